"""The supported targets: where their residual is, how their files are read and they are served."""

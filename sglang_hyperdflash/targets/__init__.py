"""Which targets exist, where their residual is, and how their files are read."""

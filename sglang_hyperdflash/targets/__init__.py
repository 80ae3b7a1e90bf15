"""Which targets exist, where their residual is, how their files are read and SGLang serves them."""

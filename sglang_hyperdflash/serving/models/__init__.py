"""The models that this package adds to SGLang's registry, as an external model package."""

"""Compare HYPERDFLASH with other methods on one target: ``python -m eval``."""

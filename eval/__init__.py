"""Compare HYPERDFLASH with its rivals on one target: ``python -m eval``."""

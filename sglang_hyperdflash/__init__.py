"""HyperDFlash (arXiv 2606.26744) as an extension of an unmodified SGLang 0.5.23."""

__version__ = "0.1.0"
SGLANG_VERSION = "0.5.23"
ALGORITHM = "HYPERDFLASH"
CPU_PLATFORM = "HYPERDFLASH_CPU"

__all__ = ["ALGORITHM", "CPU_PLATFORM", "SGLANG_VERSION", "__version__"]


def is_ours(algorithm: object) -> bool:
    """Whether an algorithm's name, as the user spelled it, or SGLang's object is HYPERDFLASH."""
    name = getattr(algorithm, "name", algorithm)
    return isinstance(name, str) and name.upper() == ALGORITHM

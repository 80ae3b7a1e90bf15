"""SGLang's EAGLE and sampled DFLASH without a GPU, to compare with: for ``eval`` and the tests.

Kernels in torch where SGLang has none for a CPU, and the portable target's MTP (NextN) layer. The
product does not depend on this package; ``plugin.py`` registers it on the CPU platform alone.
"""

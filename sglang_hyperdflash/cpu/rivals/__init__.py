"""SGLang's EAGLE and sampled DFLASH without a GPU, to compare with: for ``eval`` and the tests.

Kernels in torch where SGLang has none for a CPU, and the portable target's MTP (NextN) layer.
"""

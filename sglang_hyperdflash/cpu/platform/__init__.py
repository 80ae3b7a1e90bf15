"""SGLang on a CPU without its CPU kernels: a platform, and torch code in place of the kernels."""

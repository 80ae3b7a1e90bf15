"""SGLang on a CPU without its CPU kernels: a platform and the torch code that stands in."""

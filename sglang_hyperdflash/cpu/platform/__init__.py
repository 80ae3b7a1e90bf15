"""An SGLang platform for a CPU, with torch code in place of SGLang's kernels."""

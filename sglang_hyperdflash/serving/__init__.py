"""HYPERDFLASH inside SGLang: the algorithm, its worker and its seams."""

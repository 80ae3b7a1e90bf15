"""One file for each command of ``hyperdflash``."""

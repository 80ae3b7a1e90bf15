"""Imported by the template: compiles what every server of the tiny target would."""

from sglang_hyperdflash.portable import mhc

mhc.compiled()

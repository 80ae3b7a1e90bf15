"""Imported by the template: compiles what every server of the tiny target would."""

from cpu_engine.portable import mhc

mhc.compiled()

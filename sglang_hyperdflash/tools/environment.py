"""The environment variables that hold a number, and how it is read.

``docs/reference/variables.py`` describes all variables.
"""

import math
import os

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

DEFAULTS = {
    "HYPERDFLASH_DRAFT_TEMPERATURE": "0.5",
    "HYPERDFLASH_COPY": "32768",
    "HYPERDFLASH_DRAFT_POOL_RATIO": "0.1",
    "HYPERDFLASH_RECORD_SHARE": "0.05",
    "HYPERDFLASH_RECORD_GIB": "100",
    "HYPERDFLASH_RECORD_LENGTH": "4096",
    "HYPERDFLASH_RECORD_CONTEXT": "0",
    "HYPERDFLASH_CPU_KV_GIB": "1",
}


def positive_number(
    name: str, form: str, most: float = math.inf, least: float = math.ulp(0.0)
) -> float:
    """Return the variable's finite number from ``least`` to ``most``; its default if it is unset.

    Args:
        name: one of ``DEFAULTS``.
        form: what the number must be, for the message.
        most: the largest allowed number.
        least: the smallest allowed number; by default any number above 0.

    Raises:
        HyperDFlashConfigError: the variable is something else.
    """
    text = os.environ.get(name, DEFAULTS[name])
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (least <= value <= most and math.isfinite(value)):
        raise HyperDFlashConfigError(
            f"{name} must be {form}, found {text!r}; the default is {DEFAULTS[name]}."
        )
    return value

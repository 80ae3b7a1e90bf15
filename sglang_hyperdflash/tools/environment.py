"""Numbers that a user sets by an environment variable."""

from __future__ import annotations

import math
import os

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


def positive_number(name: str, default: float, form: str, most: float = math.inf) -> float:
    """The variable's finite number above 0 and at most ``most``; ``default`` where it is unset.

    Args:
        form: what it must be, for the message.

    Raises:
        HyperDFlashConfigError: it is something else.
    """
    text = os.environ.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (0 < value <= most and math.isfinite(value)):
        raise HyperDFlashConfigError(
            f"{name} must be {form}, found {text!r}; the default is {default:g}."
        )
    return value

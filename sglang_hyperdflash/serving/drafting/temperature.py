"""How flat the distribution is that drafts are drawn from: ``HYPERDFLASH_DRAFT_TEMPERATURE``."""

from __future__ import annotations

from sglang_hyperdflash.tools.environment import positive_number

DRAFT_TEMPERATURE = "HYPERDFLASH_DRAFT_TEMPERATURE"


def read_draft_temperature() -> float:
    """``t`` of ``draft/propose.py``.

    On six sets of the tiny target the default accepts as much as one that is learnt while serving,
    or more; 0.7 and 1 accept less, and 0, argmaxes, less at temperature 1.

    Raises:
        HyperDFlashConfigError: the variable is not a number from 0 to 1.
    """
    form = "a number from 0 (argmax drafts) to 1 (drafts at the request's own temperature)"
    return positive_number(DRAFT_TEMPERATURE, form, most=1.0, least=0.0)

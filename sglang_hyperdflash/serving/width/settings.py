"""Which verify widths a server may use, from two environment variables.

SGLang's argument parser is closed to plugins, and its own ``--speculative-adaptive`` knows named
algorithms only. A width is the rows of one verification: the anchor and ``width - 1`` drafts.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

WIDTH, WIDTHS = "HYPERDFLASH_WIDTH", "HYPERDFLASH_WIDTHS"
ADAPTIVE, FULL, RANDOM = "adaptive", "full", "random"
NARROW = (1, 2, 4)


@dataclass(frozen=True)
class WidthSetting:
    """How a server chooses widths.

    Attributes:
        mode: ``adaptive``, ``random`` (a draw every round, for tests) or ``full``: one width.
        widths: ascending and distinct; the block size is the largest there can be.
    """

    mode: str
    widths: tuple[int, ...]

    def built(self, block: int) -> tuple[int, ...]:
        """Widths with buffers, backends and graphs: the block's too, which every start has."""
        return tuple(sorted({*self.widths, block}))


def read_setting(
    block: int, causal: bool, environment: Mapping[str, str] = os.environ
) -> WidthSetting:
    """The setting of a drafter of ``block`` rows: adaptive unless a variable says otherwise.

    Args:
        causal: whether a draft depends on nothing after it in its block. Only then is a narrow
            block drafted as well as the start of a whole one, so only then is it a default.

    Raises:
        HyperDFlashConfigError: a variable is not of its form.
    """
    named = environment.get(WIDTH, "").strip() or ADAPTIVE
    if named == FULL:
        return WidthSetting(FULL, (block,))
    if named not in (ADAPTIVE, RANDOM):
        form = f"adaptive, full or a width from 1 to the drafter's block size {block}"
        return WidthSetting(FULL, (_width(WIDTH, named, block, form),))
    text = environment.get(WIDTHS, "").strip()
    if not text:
        narrow = NARROW if causal else NARROW[:1]
        return WidthSetting(named, (*(w for w in narrow if w < block), block))
    form = f"widths from 1 to the drafter's block size {block}, separated by commas"
    found = sorted({_width(WIDTHS, part.strip(), block, form) for part in text.split(",")})
    return WidthSetting(named, tuple(found))


def _width(variable: str, text: str, block: int, form: str) -> int:
    if text.isascii() and text.isdecimal() and 1 <= int(text) <= block:
        return int(text)
    raise HyperDFlashConfigError(
        f"{variable}: expected {form}, found {text!r}. Correct or unset it."
    )

"""What a server's environment says: read here, once a process, and compared over ranks.

SGLang's argument parser is closed to plugins, and its own ``--speculative-adaptive`` knows named
algorithms only. A width is the rows of one verification: the anchor and ``width - 1`` drafts.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sglang_hyperdflash.serving.record.settings import RecordSetting, read_record_setting
from sglang_hyperdflash.tools.environment import positive_number
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from triton_ops.operator import OPERATORS_VARIABLE, reference_operators_from_environment

WIDTH, WIDTHS = "HYPERDFLASH_WIDTH", "HYPERDFLASH_WIDTHS"
ADAPTIVE, FULL, RANDOM = "adaptive", "full", "random"
NARROW = (1, 2, 4)
DRAFT_TEMPERATURE = "HYPERDFLASH_DRAFT_TEMPERATURE"
POOL_RATIO = "HYPERDFLASH_DRAFT_POOL_RATIO"
COPY = "HYPERDFLASH_COPY"


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


@dataclass(frozen=True)
class ServerSettings:
    """The settings of one process.

    Attributes:
        width: how it chooses widths.
        draft_temperature: ``t`` of ``draft/propose.py``. On six sets of the tiny target the default
            accepts as much as one that is learnt while serving, or more; 0.7 and 1 accept less.
        copy_length: of a request's last tokens, those that drafts may copy; 0: none.
        pool_ratio: slots of a windowed drafter's pool per target token.
        reference_operators: operators that run their torch reference on a GPU.
        recording: what this rank records, its own affair; None: nothing.
    """

    width: WidthSetting
    draft_temperature: float
    copy_length: int
    pool_ratio: float
    reference_operators: frozenset[str]
    recording: RecordSetting | None

    def check_ranks_agree(self, gather: Callable[[list[str]], list[list[str]]]) -> None:
        """Refuse nodes whose rounds, pools or operators would differ from this one's.

        Args:
            gather: ``runners.from_all_ranks``.

        Raises:
            HyperDFlashConfigError: on every rank, so that all of them end.
        """
        shared = {
            f"{WIDTH} with {WIDTHS}": f"{self.width.mode} {self.width.widths}",
            DRAFT_TEMPERATURE: f"{self.draft_temperature:g}",
            COPY: str(self.copy_length),
            POOL_RATIO: f"{self.pool_ratio:g}",
            OPERATORS_VARIABLE: ", ".join(sorted(self.reference_operators)) or "triton",
        }
        by_setting = zip(*gather([*shared.values()]), strict=True)
        for name, values in zip(shared, by_setting, strict=True):
            if len(set(values)) > 1:
                said = "; ".join(f"rank {i}: {value}" for i, value in enumerate(values))
                raise HyperDFlashConfigError(f"{name} must be the same on all nodes; found {said}.")


def read_settings(block: int, causal: bool) -> ServerSettings:
    """The settings of a server whose drafter has ``block`` rows.

    Args:
        causal: whether a draft depends on nothing after it in its block. Only then is a narrow
            block drafted as well as the start of a whole one, so only then is it a default.

    Raises:
        HyperDFlashConfigError: a variable is not of its form.
    """
    form = "a number from 0 (argmax drafts) to 1 (drafts at the request's own temperature)"
    return ServerSettings(
        read_width(block, causal),
        positive_number(DRAFT_TEMPERATURE, form, most=1.0, least=0.0),
        read_copy_length(block),
        read_pool_ratio(),
        frozenset(reference_operators_from_environment()),
        read_record_setting(),
    )


def read_width(
    block: int, causal: bool, environment: Mapping[str, str] = os.environ
) -> WidthSetting:
    """See :func:`read_settings`: adaptive unless a variable says otherwise."""
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
    widths = {_width(WIDTHS, part.strip(), block, form) for part in text.split(",")}
    return WidthSetting(named, tuple(sorted(widths)))


def _width(variable: str, text: str, block: int, form: str) -> int:
    if text.isascii() and text.isdecimal() and 1 <= int(text) <= block:
        return int(text)
    raise HyperDFlashConfigError(
        f"{variable}: expected {form}, found {text!r}. Correct or unset it."
    )


def read_copy_length(block: int) -> int:
    """See :func:`read_settings`; also read by ``hyperdflash plan``."""
    least = max(64, 2 * block)
    form = f"a number of tokens, 0 for no copies, else at least {least}"
    length = positive_number(COPY, form, least=0.0)
    if 0 < length < least:
        raise HyperDFlashConfigError(f"{COPY} must be {form}, found {length:g}.")
    return int(length)


def read_pool_ratio() -> float:
    """See :func:`read_settings`; also read when SGLang sizes pools, before there is a worker."""
    return positive_number(POOL_RATIO, "a number above 0 and at most 1", most=1.0)

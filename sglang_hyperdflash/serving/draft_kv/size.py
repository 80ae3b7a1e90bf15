"""Bytes of draft K/V per target token, for SGLang's pool sizing."""

from __future__ import annotations

import math

from sglang.srt.runtime_context import get_spec

from sglang_hyperdflash.seams import around
from sglang_hyperdflash.serving.settings import read_pool_ratio

# Of a windowed drafter's tables (draft_kv/window.py): the slot of a token, and the owner of a slot.
INDEX_BYTES = 8


@around("sglang.srt.model_executor.pool_configurator:_dflash_draft_cell_size", "1b69046a6e94")
def draft_cell_size(original, kvc) -> int:
    """Bytes per target token of the draft's pool, fewer for a windowed drafter.

    A window's tables are counted with it. SGLang's configurators and our hook on DeepSeek-V4's
    budget the draft from it.
    """
    cell = original(kvc)
    draft = getattr(kvc.spec_aux_config, "draft_model_config", None)
    if cell <= 0 or draft is None:
        return cell
    ours = getattr(draft.hf_config, "hyperdflash_config", None) is not None
    windowed = get_spec().speculative_draft_window_size is not None
    return windowed_cell_size(cell) if ours and windowed else cell


def windowed_cell_size(cell: int) -> int:
    """Bytes per target token of a windowed drafter's pool, a slot of which has ``cell`` bytes.

    Raises:
        HyperDFlashConfigError: the pool's ratio is no such number.
    """
    return math.ceil((cell + INDEX_BYTES) * read_pool_ratio()) + INDEX_BYTES

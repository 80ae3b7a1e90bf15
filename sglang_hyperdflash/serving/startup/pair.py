"""The loaded pair of target and drafter, checked against each other when the worker starts."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang.srt.layers.radix_attention import AttentionType

from sglang_hyperdflash.draft.config import check_fingerprint
from sglang_hyperdflash.draft.reducer import check_kernels
from sglang_hyperdflash.serving.drafting.model import HyperDFlashDraftModel
from sglang_hyperdflash.serving.width.settings import WIDTH, WIDTHS
from sglang_hyperdflash.targets.loaded import target_hc_head
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, SeamError

logger = logging.getLogger(__name__)


def check_pair(worker: Any) -> None:
    """Refuse a loaded pair that does not belong together (widths, block, hc_head).

    Raises:
        HyperDFlashConfigError: expected, found and what to do.
    """
    draft = worker.draft_model
    if not isinstance(draft, HyperDFlashDraftModel):
        raise HyperDFlashConfigError(
            f"expected a HyperDFlashDraftModel draft, found {type(draft).__name__}."
        )
    config = draft.hyperdflash_config
    if worker.block != config.block_size:
        raise HyperDFlashConfigError(
            f"expected block size {config.block_size}, which the drafter was trained with; "
            f"found {worker.block}. Drop the flags that set it."
        )
    target = worker.target_worker.model_runner
    facts = target.model_config.hf_text_config
    width = (getattr(facts, "hc_mult", None) or 0) * facts.hidden_size
    if not config.captured_layers and width != config.hc_mult * config.hidden_size:
        raise HyperDFlashConfigError(
            f"expected a target whose pre-collapse residual has "
            f"{config.hc_mult * config.hidden_size} values, which the drafter reads; found "
            f"{width}. Serve the target that the drafter was trained for."
        )
    hc_head = target_hc_head(target.model)
    check_fingerprint(config, None if hc_head is None else hc_head.fingerprint())
    hidden_norm = draft.hidden_norm.weight
    check_kernels(draft.reducer_module, hidden_norm)
    fused_kv = fused_kv_in_use(worker)
    if hidden_norm.is_cuda and not fused_kv:
        logger.warning("HYPERDFLASH: SGLang's fused draft K/V write is off; see its message above")
    logger.info(
        "HYPERDFLASH ready: source=%s reducer=%s kernels=%s fused_kv=%s block_size=%d paths=%d "
        "head=%s causal=%s",
        config.source,
        config.reducer,
        "triton" if hidden_norm.is_cuda else "torch",
        fused_kv,
        config.block_size,
        config.hc_mult,
        f"rank {config.dependency.rank}, K {worker.drafter.candidates}"
        if worker.drafter.head
        else None,
        config.causal,
    )


def fused_kv_in_use(worker: Any) -> bool:
    """Whether the worker still writes draft K/V of all layers with SGLang's one fused kernel.

    Seam: ``DFlashWorkerV2._use_fused_kv_materialize`` and ``_fused_kv_helper``. SGLang clears both,
    with no more than a warning, when the fused path cannot be set up or fails once.
    """
    try:
        return bool(worker._use_fused_kv_materialize) and worker._fused_kv_helper is not None
    except AttributeError as error:
        raise SeamError(f"SGLang seam DFlashWorkerV2 fused K/V is gone: {error}") from error


def drafts_causally(worker: Any) -> bool:
    """Whether every draft layer is causal inside a block.

    Seam: ``DFlashAttention.attn``; SGLang reads ``is_causal`` of some configs only.
    """
    kinds = [layer.self_attn.attn.attn_type for layer in worker.draft_model.layers]
    return all(kind == AttentionType.DECODER for kind in kinds)


def check_ranks_agree(setting: Any, gather: Callable[[Any], list[Any]]) -> None:
    """Refuse nodes whose environments name different widths: their rounds would not meet.

    Args:
        setting: a ``WidthSetting``. gather: every rank's object; seam:
            ``GroupCoordinator.all_gather_object``.

    Raises:
        HyperDFlashConfigError: on every rank, so that all of them end.
    """
    found = gather(setting)
    if any(other != setting for other in found):
        said = "; ".join(f"rank {i}: {one.mode} of {one.widths}" for i, one in enumerate(found))
        raise HyperDFlashConfigError(
            f"{WIDTH} and {WIDTHS} must be the same on all nodes; found {said}."
        )


def check_processors(width_1_allowed: bool, enabled: bool) -> None:
    """Custom logit processors need rounds of width 1.

    Raises:
        HyperDFlashConfigError: they are enabled on a server that verifies whole blocks only.
    """
    if enabled and not width_1_allowed:
        raise HyperDFlashConfigError(
            "--enable-custom-logit-processor: expected a server that can verify one row per "
            "request; found attention data parallelism, two-batch overlap or "
            "--enable-pd-role-switch, where only whole blocks are verified. Drop the flag."
        )

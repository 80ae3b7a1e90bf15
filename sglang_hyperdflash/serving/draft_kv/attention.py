"""The drafter's attention backend: correct, of bounded size, without waits for host lengths.

SGLang lets a DFLASH draft share the target's backend, and falls back to FlashInfer where the
target's is no draft backend: DeepSeek-V4's ``dsv4``. FlashInfer plans on the host, so it costs one
wait a round; and its graph buffers are one context for every row of a batch.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import torch

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

logger = logging.getLogger(__name__)

# Draft attention backends whose K/V indices are slots, not pages.
TOKEN_BACKENDS = ("flashinfer", "triton", "torch_reference")
# Blocks beyond its context that a request's list of indices may hold: SGLang's host bound counts
# the drafted block twice, and a finished request runs once more under overlap scheduling.
BLOCKS = 3
# Backends whose graphs hold one index for every token that a request may have.
INDEX_DTYPES = {"FlashInferAttnBackend": torch.int32, "TritonAttnBackend": torch.int64}


def chosen(
    target: str | None, window: int | None, choices: Sequence[str], *, sm90: bool, sm100: bool
) -> tuple[str, str] | None:
    """The draft's backend on a GPU when the user named none, and why; None to leave it to SGLang.

    Args:
        target: the target's backend. window: the drafter's. choices: what a draft may use.
        sm90, sm100: the GPU's generation.
    """
    if window is not None:
        return "triton", "a windowed drafter's K/V lie in single slots, its lengths on the device"
    if target in choices:
        return None
    reason = f"the target's {target} serves no draft, and FlashInfer waits for the host every round"
    return ("fa3" if sm90 else "fa4" if sm100 else "triton"), reason


def choose_draft_attention(server_args, window: int | None) -> None:
    """Choose the draft's backend where the user did not, with the reason in one log line.

    Seam: ``speculative_hook._resolve_dflash_draft_attention_backend`` takes a name that is given.
    A platform of its own, as ours for CPUs, and HIP and XPU keep SGLang's choice.
    """
    from sglang.srt.arg_groups import overrides
    from sglang.srt.arg_groups.choices import DRAFT_ATTENTION_BACKEND_CHOICES
    from sglang.srt.platforms import current_platform
    from sglang.srt.runtime_context import get_platform

    platform = get_platform()
    named = overrides.resolving_view(server_args).speculative_draft_attention_backend
    no_cuda = current_platform.is_out_of_tree() or platform.is_hip or platform.is_xpu
    if named is not None or no_cuda:
        return
    target, _ = overrides.attention_backends_of(overrides.resolved_view(server_args))
    sm90, sm100 = bool(platform.is_sm90), bool(platform.is_sm100)
    choice = chosen(target, window, DRAFT_ATTENTION_BACKEND_CHOICES, sm90=sm90, sm100=sm100)
    if choice is not None:
        server_args.speculative_draft_attention_backend = choice[0]
        logger.info("%s: draft attention is %s: %s.", ALGORITHM, *choice)


def check_window_attention(window: int | None, backend: str) -> None:
    """Refuse a resolved backend that cannot read a windowed drafter's slots.

    Raises:
        HyperDFlashConfigError: it reads whole pages.
    """
    if window is not None and backend not in TOKEN_BACKENDS:
        raise HyperDFlashConfigError(
            f"a windowed drafter, and any on a prefill or decode node or with a cache's storage, "
            "needs draft attention that reads single K/V slots "
            f"({', '.join(TOKEN_BACKENDS)}); speculative_draft_attention_backend={backend} reads "
            "whole pages. Drop the flag, or pass --speculative-draft-attention-backend triton."
        )


def graph_context(context: int, window: int | None, block: int) -> int:
    """Tokens for which a draft's backend is built: the context's, or a window's and two blocks'."""
    return context if window is None else window + 2 * block


def bound_graph_buffers(backend, block: int) -> None:
    """Give a draft's graphs room for one context a request, not for one a row of the batch.

    Seam: ``init_cuda_graph_state(max_bs, max_num_tokens, kv_indices_buf)`` of FlashInfer's and
    Triton's backends. A request's ``block`` rows share one list of indices. FlashInfer's mask
    buffer is dropped: no drafted block has a custom mask, and planning one would raise.
    """
    name = type(backend).__name__
    if name not in INDEX_DTYPES:
        return
    original = backend.init_cuda_graph_state

    def bounded(max_bs: int, max_num_tokens: int, kv_indices_buf=None, *rest, **options) -> None:
        context = backend.max_context_len
        if kv_indices_buf is None:
            kv_indices_buf = torch.zeros(
                max_bs * (context + BLOCKS * block),
                dtype=INDEX_DTYPES[name],
                device=getattr(backend, "device", "cuda"),
            )
        if name == "FlashInferAttnBackend":
            backend.max_context_len = 0
        try:
            original(max_bs, max_num_tokens, kv_indices_buf, *rest, **options)
        finally:
            backend.max_context_len = context

    backend.init_cuda_graph_state = bounded

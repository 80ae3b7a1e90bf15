"""The operators of a round when a worker starts: kernels are built, and wrong ones replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from sglang_hyperdflash.draft.reducer import HCGateReducer
from sglang_hyperdflash.serving.verification.rehearsal import rehearse
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from triton_ops import operator
from triton_ops.comparison import Comparison
from triton_ops.hc_gate_op import ROW_KERNEL_TOKENS

logger = logging.getLogger(__name__)


def check_operator_names() -> None:
    """Refuse a ``HYPERDFLASH_OPERATORS`` that names no operator.

    Raises:
        HyperDFlashConfigError: expected, found and what to do.
    """
    unknown = operator.named_in_torch() - operator.OPERATORS.keys() - {operator.ALL}
    if unknown:
        raise HyperDFlashConfigError(
            f"{operator.OPERATORS_VARIABLE}: expected {operator.NONE}, {operator.ALL}, or some of "
            f"{', '.join(operator.OPERATORS)}, separated by commas; found "
            f"{', '.join(sorted(unknown))}. Correct or unset it."
        )


@torch.inference_mode()
def rehearse_reducer(reducer: torch.nn.Module, hidden_norm: torch.Tensor) -> None:
    """Reduce few and many tokens; only an :class:`HCGateReducer` has kernels of ours.

    Args:
        hidden_norm: ``[d]``, in the dtype of the residuals.
    """
    if isinstance(reducer, HCGateReducer):
        generator = torch.Generator().manual_seed(0)
        for tokens in (1, ROW_KERNEL_TOKENS + 1):
            hidden = torch.randn(tokens, reducer.fn.shape[1], generator=generator)
            reducer(hidden.to(hidden_norm), hidden_norm)


def check_operators(
    draft: Any,
    candidates: int,
    vocabulary: int,
    widths: Iterable[int],
    gather: Callable[[dict[str, str]], Iterable[dict[str, str]]] | None = None,
) -> None:
    """Build every kernel that rounds need; those that are wrong here run their reference instead.

    Args:
        draft: the loaded drafter. widths: of rounds; a node that verifies nothing has none.
        gather: all ranks' differences; they replace the same operators. None for one rank.
    """
    if operator.ALL in operator.in_torch:
        return
    norm, begun = draft.hidden_norm.weight, "HYPERDFLASH builds its kernels and checks them, widths"
    logger.info("%s %s; only a first start takes minutes", begun, sorted(widths))
    with torch.inference_mode(), Comparison() as comparison:
        rehearse_reducer(draft.reducer_module, norm)
        rehearse(draft.dependency, candidates, vocabulary, widths, norm.device)
    found = [comparison.wrong] if gather is None else gather(comparison.wrong)
    for name, difference in {k: v for wrong in found for k, v in wrong.items()}.items():
        operator.in_torch.add(name)
        logger.warning(
            "HYPERDFLASH: the kernel of %s is wrong on this machine (%s). Its torch reference "
            "replaces it: the answers stay right, rounds take longer. If few drafts are accepted, "
            "try --speculative-draft-attention-backend triton as well. Please report this with "
            "the output of: hyperdflash check --gpu",
            *(name, difference),
        )
    if norm.is_cuda:
        torch.cuda.empty_cache()


def kernels_in_use(on_gpu: bool) -> str:
    """What the line at start says of the operators."""
    replaced = operator.in_torch
    if not on_gpu or operator.ALL in replaced:
        return "torch"
    return "triton" + (f" (torch: {', '.join(sorted(replaced))})" if replaced else "")

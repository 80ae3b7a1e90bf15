"""The operators of a round when a worker starts: kernels are built, and wrong ones replaced."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from sglang_hyperdflash.draft.reducer import HCGateReducer
from sglang_hyperdflash.serving.verification.rehearsal import BROKEN, RANDOM, TIES, rehearse
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from triton_ops import operator
from triton_ops.comparison import Comparison

logger = logging.getLogger(__name__)


def check_operator_names() -> None:
    """Refuse a ``HYPERDFLASH_OPERATORS`` that names no operator.

    Raises:
        HyperDFlashConfigError: expected, found and what to do.
    """
    known = {operator.ALL, *operator.OPERATORS}
    unknown = operator.reference_operators_from_environment() - known
    if unknown:
        raise HyperDFlashConfigError(
            f"{operator.OPERATORS_VARIABLE}: expected {operator.NONE}, {operator.ALL}, or some of "
            f"{', '.join(operator.OPERATORS)}, separated by commas; found "
            f"{', '.join(sorted(unknown))}. Correct or unset it."
        )


@torch.inference_mode()
def rehearse_reducer(reducer: torch.nn.Module, hidden_norm: torch.Tensor) -> None:
    """Reduce some tokens; only an :class:`HCGateReducer` has a kernel of ours.

    Args:
        hidden_norm: ``[d]``, in the dtype of the residuals.
    """
    if isinstance(reducer, HCGateReducer):
        hidden = torch.randn(7, reducer.fn.shape[1], generator=torch.Generator().manual_seed(0))
        reducer(hidden.to(hidden_norm), hidden_norm)


def check_operators(
    draft: Any,
    candidates: int,
    vocabulary: int,
    widths: Sequence[int],
    copied: int,
    gather: Callable[[dict[str, str]], Iterable[dict[str, str]]],
) -> None:
    """Build every kernel that rounds need; those that are wrong here run their reference instead.

    Args:
        draft: the loaded drafter. widths: of rounds, ascending. copied: as of ``rehearse``.
        gather: gives all ranks' differences; they replace the same operators.
    """
    if operator.ALL in operator.reference_operators:
        return
    norm, begun = draft.hidden_norm.weight, "HYPERDFLASH builds its kernels and checks them, widths"
    logger.info("%s %s; only a first start takes minutes", begun, widths)
    with torch.inference_mode(), Comparison() as comparison:
        rehearse_reducer(draft.reducer_module, norm)
        for kind, some in ((RANDOM, widths), (TIES, [max(widths)]), (BROKEN, [max(widths)])):
            comparison.exact = kind == TIES and draft.dependency is None  # of a head's sums none is
            given = candidates, vocabulary, some, norm.device, kind
            rehearse(draft.dependency, *given, copied=copied)
    by_rank = gather(comparison.wrong)
    for name, difference in {k: v for wrong in by_rank for k, v in wrong.items()}.items():
        operator.reference_operators.add(name)
        logger.warning(
            "HYPERDFLASH: the kernel of %s is wrong on this machine (%s). Its torch reference "
            "replaces it: answers stay right, rounds take longer and more memory. If few drafts "
            "are accepted, try --speculative-draft-attention-backend triton as well. Please report "
            "this with the output of: hyperdflash check --gpu",
            *(name, difference),
        )
    torch.cuda.empty_cache()


def kernels_in_use(on_gpu: bool) -> str:
    """What the line at start says of the operators."""
    replaced = operator.reference_operators
    if not on_gpu or operator.ALL in replaced:
        return "torch"
    return "triton" + (f" (torch: {', '.join(sorted(replaced))})" if replaced else "")

"""Grammars in a round: what they allow in every row, and the end of a request whose matcher fails.

A matcher can fail at a mask, at a draft or at undoing one, after a token that the grammar did not
allow: where EOS is all that it allows and ``min_new_tokens`` forbids it, for one. SGLang ends the
request when it counts that token. Under overlap scheduling the next round has begun by then.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from http import HTTPStatus
from typing import Any

import torch
from sglang.srt.constrained.base_grammar_backend import GrammarMask
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.speculative.spec_utils import GrammarTree, traverse_tree

logger = logging.getLogger(__name__)


def block_mask(
    batch: Any, tree: GrammarTree, device: torch.device, barrier: Callable[[], None] | None
) -> GrammarMask | None:
    """The tokens that grammars allow in every row of the batch's blocks.

    Seam: ``spec_utils.build_grammar_vocab_mask``, where a matcher's error ends the server. Here it
    ends its request with HTTP 500, as SGLang ends one whose token is not accepted.

    Args:
        tree: the blocks ``[bs, width]``, on their way to the host.
        barrier: see :meth:`HyperDFlashWorker.decode`.
    """
    if barrier is not None:
        barrier()
    children, siblings, tokens = tree.resolve()
    info, mask, grammar = batch.sampling_info, None, None
    for i, req in enumerate(batch.reqs):
        if req.grammar is None:
            continue
        grammar = req.grammar
        if mask is None:
            mask = grammar.allocate_vocab_mask(info.vocab_size, tokens.numel(), "cpu")
            blocks = mask.view(*tokens.shape, -1)
        try:
            traverse_tree(children[i], siblings[i], tokens[i], grammar, blocks[i], info.vocab_size)
        except Exception as error:  # of any backend
            blocks[i] = -1  # all tokens
            _end(req, error)
    if mask is None:
        return None
    info.grammar_mask = None  # of a prefill, which SGLang would apply instead
    return GrammarMask(grammar, mask.to(device, non_blocking=True))


def pass_by_failed(reqs: Iterable[Any]) -> None:
    """Leave requests that end out of a mixed batch's masks, where a failed matcher may raise.

    Seam: ``SamplingBatchInfo.update_regex_vocab_mask`` passes by grammars that are finished.
    """
    for req in reqs:
        if req.grammar is not None and req.to_finish is not None:
            req.grammar.finished = True


def _end(req: Any, error: Exception) -> None:
    """Seam: ``SchedulerBatchResultProcessor._accept_grammar_tokens`` ends requests like this."""
    logger.error("HYPERDFLASH: the grammar of request %s failed: %s", req.rid, error)
    if req.to_finish is None:
        kind = HTTPStatus.INTERNAL_SERVER_ERROR, "InternalServerError"
        req.to_finish = FINISH_ABORT(f"Grammar failed: {error}", *kind)

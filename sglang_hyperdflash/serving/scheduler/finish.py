"""Where a request ends inside a block: at the token where decoding one by one would end it.

SGLang checks a whole accepted block at once: it finds the first *listed* stop string in it, not the
earliest, prefers strings to stop tokens whichever came first, and an impossible id to either.
"""

from __future__ import annotations

import logging

from sglang_hyperdflash.seams import around
from sglang_hyperdflash.serving.verification.prefill import worker_is_ours

logger = logging.getLogger(__name__)

NAN_MATCHED = "NaN happened"
_warned = False


@around("sglang.srt.managers.schedule_batch:Req.update_finish_state", "e351e67cbe30")
def finish_as_one_by_one(original, self, new_accepted_len: int = 1) -> None:
    """End a request, and its reasoning's count, where decoding one by one would.

    SGLang has counted the whole block by then.
    """
    finish_token_by_token(original, self, new_accepted_len)
    if worker_is_ours() and self.finished_len is not None:
        # Thinking comes first in an answer.
        self.reasoning_tokens = min(self.reasoning_tokens, self.finished_len)
        _warn_of_broken_row(self)


def _warn_of_broken_row(req) -> None:
    """Log one warning in the life of a server where SGLang ended a request at an impossible id.

    Seam: the reason that ``Req._check_vocab_boundary_finish`` gives. SGLang logs nothing there.
    """
    global _warned
    if not _warned and getattr(req.finished_reason, "matched", None) == NAN_MATCHED:
        _warned = True
        logger.warning(
            "HYPERDFLASH: request %s ended at output token %d: the target's logits hold a NaN or "
            "infinity, or nothing finite. Look at the target's precision and quantization, and at "
            "custom logit processors. Logged once.",
            req.rid,
            req.finished_len - 1,
        )


def finish_token_by_token(original, self, new_accepted_len: int) -> None:
    """Let SGLang check the accepted block; where something ends in it, find the earliest end.

    The block is then replayed token by token, as without speculation. A round that ends nothing
    costs one decoded tail with stop strings, and one per token with regexes: those are replayed at
    once, because SGLang's own check of a block decodes every prefix for every regex.

    A grammar has accepted the block already, up to the token that completes it (seam:
    ``SchedulerBatchResultProcessor._accept_grammar_tokens``): it can end at the last token only.
    """
    n = new_accepted_len
    if n < 2 or self.finished() or self.to_finish or not worker_is_ours():
        return original(self, n)
    accepted = list(self.output_ids[-n:])
    if not self.sampling_params.stop_regex_strs:
        original(self, n)
        if not self.finished():
            return None
        self.finished_reason = self.finished_len = None
    del self.output_ids[-n:]
    grammar, self.grammar = self.grammar, None
    try:
        for i, token in enumerate(accepted, 1):
            self.output_ids.append(token)
            if i == n:
                self.grammar = grammar
            original(self, 1)
            if self.finished():
                if self.finished_len is None:
                    self.finished_len = len(self.output_ids)
                # The K/V cache counts what was accepted, not what is emitted.
                self.output_ids.extend(accepted[i:])
                return None
    finally:
        self.grammar = grammar
    return None


@around("sglang.srt.session.session_controller:Session.create_req", "5ab6558cdd5b")
def end_turns_at_their_stop(original, self, *args, **kwargs):
    """Make a session's request; the answers before it lose what their blocks held after the end.

    SGLang appends their ``output_ids``. Sessions that stream cut them.
    """
    if worker_is_ours():
        for node in self.req_nodes.values():
            if node.req.finished_len is not None:
                node.req.output_ids = node.req.output_ids_through_stop
    return original(self, *args, **kwargs)


@around(
    "sglang.srt.managers.scheduler_components.logprob_result_processor"
    ":SchedulerLogprobResultProcessor.add_logprob_return_values",
    "996e41eb3f6c",
)
def no_logprob_without_a_token(original, self, i, req, *args, **kwargs) -> int:
    """Drop the logprob of a token that was not asked for, with ``max_new_tokens`` 0.

    Without speculation SGLang draws no token for such requests; with it, one is drawn and dropped.
    A prefill node sends it on, with its logprob.
    """
    from sglang.srt.runtime_context import get_disagg

    count = original(self, i, req, *args, **kwargs)
    alone = get_disagg().disaggregation_mode != "prefill"
    if worker_is_ours() and alone and req.sampling_params.max_new_tokens == 0:
        req.logprob.output_token_logprobs_val.clear()
        req.logprob.output_token_logprobs_idx.clear()
    return count

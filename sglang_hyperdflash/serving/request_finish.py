"""Where a request ends inside a block: at the token where decoding one by one would end it.

SGLang looks at a whole accepted block at once: for the first *listed* stop string in it, not the
earliest, and for strings before stop tokens, whichever came first.
"""

from __future__ import annotations

import logging

from sglang_hyperdflash.seams import Seam
from sglang_hyperdflash.serving.sampling_seams import worker_is_ours

logger = logging.getLogger(__name__)

NAN_MATCHED = "NaN happened"
_warned = False


def finish_as_one_by_one(original, self, new_accepted_len: int = 1) -> None:
    """End a request, and its reasoning's count, where decoding one by one would.

    Seam: ``Req.update_finish_state``. SGLang has counted the whole block by then.
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
    """Let SGLang look at the accepted tokens one at a time, and stop at the first that ends it.

    Without stop strings and regexes SGLang's own check already finds the earliest stop token. The
    cost is one decoded tail a token, as without speculation.
    """
    n, params = new_accepted_len, self.sampling_params
    if n < 2 or self.finished() or self.to_finish or not worker_is_ours():
        return original(self, n)
    if not (params.stop_strs or params.stop_regex_strs):
        return original(self, n)
    accepted = list(self.output_ids[-n:])
    del self.output_ids[-n:]
    # The grammar has accepted the whole block: it may speak of the last token only.
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
                self.output_ids.extend(accepted[i:])
                return None
    finally:
        self.grammar = grammar
    return None


def end_turns_at_their_stop(original, self, *args, **kwargs):
    """Make a session's request; the answers before it lose what their blocks held behind the end.

    Seam: ``Session.create_req``, which appends ``output_ids``. Sessions that stream cut them.
    """
    if worker_is_ours():
        for node in self.req_nodes.values():
            if node.req.finished_len is not None:
                node.req.output_ids = node.req.output_ids_through_stop
    return original(self, *args, **kwargs)


def no_logprob_without_a_token(original, self, i, req, *args, **kwargs) -> int:
    """Drop the logprob of a token that was not asked for, with ``max_new_tokens`` 0.

    Seam: ``SchedulerLogprobResultProcessor.add_logprob_return_values``. Without speculation SGLang
    draws no token for such requests; with it, one is drawn and dropped. A prefill node sends it on,
    with its logprob.
    """
    from sglang.srt.runtime_context import get_disagg

    found = original(self, i, req, *args, **kwargs)
    alone = get_disagg().disaggregation_mode != "prefill"
    if worker_is_ours() and alone and req.sampling_params.max_new_tokens == 0:
        req.logprob.output_token_logprobs_val.clear()
        req.logprob.output_token_logprobs_idx.clear()
    return found


SEAMS = (
    Seam(
        "sglang.srt.managers.schedule_batch:Req.update_finish_state",
        "around",
        finish_as_one_by_one,
        ("self", "new_accepted_len"),
        "3ae4054e08ea",
        "of several stop conditions in one block the earliest must win, as without speculation",
    ),
    Seam(
        "sglang.srt.session.session_controller:Session.create_req",
        "around",
        end_turns_at_their_stop,
        (
            "self",
            "req",
            "tokenizer",
            "vocab_size",
            "eos_token_ids",
            "disagg_mode",
            "req_factory",
        ),
        "e06f376a3dff",
        "a session's next turn must follow the answer, not the block that it ended in",
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.logprob_result_processor"
        ":SchedulerLogprobResultProcessor.add_logprob_return_values",
        "around",
        no_logprob_without_a_token,
        ("self", "i", "req", "pt", "next_token_ids", "num_input_logprobs", "output"),
        "a59f17cd8267",
        "a request of no tokens has no token's logprob, as without speculation",
    ),
)

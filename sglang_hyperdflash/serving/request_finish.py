"""Where a request ends inside a block: at the token where decoding one by one would end it.

SGLang looks at a whole accepted block at once: for the first *listed* stop string in it, not the
earliest, and for strings before stop tokens, whichever came first. A grammar looks at it before
either, and takes a broken row's id for a token that it forbids.
"""

from __future__ import annotations

from sglang_hyperdflash.seams import Seam
from sglang_hyperdflash.serving.sampling_seams import worker_is_ours


def finish_as_one_by_one(original, self, new_accepted_len: int = 1) -> None:
    """End a request, and its reasoning's count, where decoding one by one would.

    Seam: ``Req.update_finish_state``. SGLang has counted the whole block by then.
    """
    finish_token_by_token(original, self, new_accepted_len)
    if worker_is_ours() and self.finished_len is not None:
        # Thinking comes first in an answer.
        self.reasoning_tokens = min(self.reasoning_tokens, self.finished_len)


def finish_token_by_token(original, self, new_accepted_len: int) -> None:
    """Let SGLang look at the accepted tokens one at a time, and stop at the first that ends it.

    Without stop strings and regexes SGLang's own check already
    finds the earliest stop token, but a broken row's id, always a block's last, before any. The
    cost is one decoded tail a token, as without speculation.
    """
    n, params = new_accepted_len, self.sampling_params
    if n < 2 or self.finished() or self.to_finish or not worker_is_ours():
        return original(self, n)
    broken = self.vocab_size is not None and self.output_ids[-1] >= self.vocab_size
    if not (broken or params.stop_strs or params.stop_regex_strs):
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
                rest = accepted[i:]
                if broken and rest:
                    rest[-1] = 0  # the impossible id of a row that nobody reads now
                self.output_ids.extend(rest)
                return None
    finally:
        self.grammar = grammar
    return None


def keep_broken_from_grammar(original, self, req, tokens) -> list[int]:
    """Advance a grammar to a broken row's id, which is then left to :func:`finish_token_by_token`.

    Seam: ``SchedulerBatchResultProcessor._accept_grammar_tokens``. It would abort the request for a
    token that is not in the grammar, though a stop before it may have ended the answer.

    Returns:
        the tokens to commit, the broken row's id among them unless the grammar ended before it.
    """
    run = [tokens] if isinstance(tokens, int) else tokens
    at = next((i for i, token in enumerate(run) if token >= req.vocab_size), None)
    if at is None or not worker_is_ours():
        return original(self, req, tokens)
    retained = original(self, req, run[:at])
    if len(retained) < at or req.grammar.is_terminated():
        return retained
    return [*retained, run[at]]


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
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ":SchedulerBatchResultProcessor._accept_grammar_tokens",
        "around",
        keep_broken_from_grammar,
        ("self", "req", "tokens"),
        "882fd01933fc",
        "a broken row in a grammar's request must be told as such, and not before a stop",
    ),
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

"""Requests that would end a server, refused with HTTP 400.

SGLang checks the ids of ``token_ids_logprob`` and ``logit_bias`` before it schedules a request. It
checks neither a prompt's ids nor how many top logprobs are asked for: the scheduler fails at them
while it runs a batch, and the server ends with every request it holds.

Fields of sessions, and of routes that SGLang does not type (Vertex, Ollama), can still end it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.managers.embed_types import PositionalEmbeds

from sglang_hyperdflash import is_ours
from sglang_hyperdflash.seams import after

# SGLang's own word for all tokens is smaller.
INT32 = 2**31 - 1


@after(
    "sglang.srt.managers.tokenizer_manager:TokenizerManager._validate_one_request",
    "913d991d7010",
)
def refuse_what_ends_a_server(_, self, obj: Any, input_ids: Sequence[int] | None) -> None:
    """Refuse an empty prompt, ids outside the vocabulary, and what no batch can hold.

    Every HTTP request of Python's server comes by here, each of a batch too. SGLang answers a
    ``ValueError`` with HTTP 400.

    Raises:
        ValueError: what is wrong with the request.
    """
    if is_ours(self.server_args.speculative_algorithm):
        # A processor has placeholders of its own; without one SGLang ignores the image.
        text = None if self.mm_processor and obj.contains_mm_input() else input_ids
        config = self.model_config
        wrong = what_ends_a_server(obj, text, config.vocab_size, config.hidden_size)
        if wrong is not None:
            raise ValueError(wrong)


def what_ends_a_server(
    obj: Any, input_ids: Sequence[int] | None, vocab_size: int, hidden_size: int
) -> str | None:
    """What is wrong with a request, or None.

    Args:
        obj: SGLang's ``GenerateReqInput`` of one prompt.
        input_ids: the prompt's tokens; None where embeddings or a multimodal processor replace it.
    """
    for name in ("top_logprobs_num", "logprob_start_len"):
        if not isinstance(getattr(obj, name), int):
            return f"{name} of one prompt must be a number; found {getattr(obj, name)}."
    if obj.top_logprobs_num > vocab_size:  # whether it asks for logprobs: another of its batch may
        return f"top logprobs must be at most {vocab_size}; found {obj.top_logprobs_num}."
    if obj.return_logprob and obj.logprob_start_len < -1:
        return f"logprob_start_len must be at least -1; found {obj.logprob_start_len}."
    if (obj.sampling_params.get("top_k") or 0) > INT32:
        return f"top_k must be at most {INT32}; found {obj.sampling_params['top_k']}."
    if not isinstance(obj.positional_embed_overrides, PositionalEmbeds | None):
        return "positional_embed_overrides cannot be sent as JSON."
    rows = obj.input_embeds or getattr(obj.positional_embed_overrides, "embeds", ())
    lengths = {len(row) for row in rows} - {hidden_size}
    if lengths:
        return f"an embedding must have {hidden_size} numbers; found {min(lengths)}."
    if input_ids is None:
        return None
    if not len(input_ids):
        # A session's history comes before it; without any SGLang refuses it.
        session = (obj.session_params or {}).get("id")
        return None if session else "a prompt must have at least one token; found none."
    for token in (min(input_ids), max(input_ids)):
        if not 0 <= token < vocab_size:
            return f"token ids of a prompt must be in [0, {vocab_size}); found {token}."
    return None

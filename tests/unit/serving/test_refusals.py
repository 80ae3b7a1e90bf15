"""What would end a server is refused before it is scheduled, where HYPERDFLASH serves."""

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_hyperdflash.serving.refusals import refuse_what_ends_a_server

VOCABULARY, HIDDEN = 100, 8
# What ``tests/engine/test_api.py`` does not send: fields of a request, and the value that is named.
REFUSED = {
    "no session's id": ({"text": "", "tokens": [], "session_params": {"rid": "r"}}, "none"),
    # Without a processor SGLang ignores the image and runs the ids.
    "negative id with an image": ({"input_ids": [5, -1], "image_data": "image"}, "-1"),
    "first logprob": ({"input_ids": [5], "return_logprob": True, "logprob_start_len": -2}, "-2"),
    "top-k": ({"input_ids": [5], "sampling_params": {"top_k": 2**31}}, "2147483648"),
    # Another request of its batch may ask for logprobs.
    "embeddings": ({"input_embeds": [[0.5]], "top_logprobs_num": 10_000}, "10000"),
    "short embeddings": ({"input_embeds": [[0.5] * HIDDEN, [0.5]]}, "1"),
    "short embeddings of a score": (
        {"input_ids": [5], "positional_embed_overrides": PositionalEmbeds([torch.zeros(2)], [0])},
        "2",
    ),
    # A list for one prompt stays a list: to compare it would be HTTP 500.
    "list of first logprobs": ({"input_ids": [5], "logprob_start_len": [0]}, "number"),
}
ALLOWED = {
    "ends of the vocabulary": {"input_ids": [0, 99]},
    "every logprob": {"input_ids": [5], "return_logprob": True, "top_logprobs_num": 100},
    # What SGLang takes for none at all.
    "negative logprobs": {"input_ids": [5], "top_logprobs_num": -1},
    "no logprob": {"input_ids": [5], "logprob_start_len": -2},
    "any top-k": {"input_ids": [5], "sampling_params": {"top_k": 1 << 30}},
    "embeddings": {"input_embeds": [[0.5] * HIDDEN] * 2},
    "a session's turn": {"input_ids": [], "session_params": {"id": "s", "rid": "r"}},
    "a session's empty text": {"text": "", "tokens": [], "session_params": {"id": "s"}},
    "embeddings of a score": {
        "input_ids": [5],
        "positional_embed_overrides": PositionalEmbeds([torch.zeros(HIDDEN)], [0]),
    },
}


def validate(fields: dict, algorithm: str | None, processor: object = None) -> None:
    """Send a request through our hook, as SGLang's own check would let it pass."""
    tokens = fields.get("tokens", fields.get("input_ids"))
    request = GenerateReqInput(**{k: v for k, v in fields.items() if k != "tokens"})
    request.normalize_batch_and_arguments()
    manager = SimpleNamespace(
        server_args=SimpleNamespace(speculative_algorithm=algorithm),
        model_config=SimpleNamespace(vocab_size=VOCABULARY, hidden_size=HIDDEN),
        mm_processor=processor,
    )
    refuse_what_ends_a_server(None, manager, request, tokens)


@pytest.mark.parametrize("name", REFUSED)
def test_refused_where_ours_serves_and_nowhere_else(name):
    fields, said = REFUSED[name]
    for spelling in ("HYPERDFLASH", "hyperdflash"):
        with pytest.raises(ValueError, match=said):
            validate(fields, spelling)
    for other in (None, "DFLASH"):
        validate(fields, other)


def test_nothing_else_is_refused():
    for fields in ALLOWED.values():
        validate(fields, "HYPERDFLASH")
    # A processor's placeholders are its own.
    validate({"input_ids": [5, -1], "image_data": ["image"]}, "HYPERDFLASH", processor=object())

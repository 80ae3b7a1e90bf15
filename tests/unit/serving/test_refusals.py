"""What would end a server is refused before it is scheduled, where HYPERDFLASH serves."""

from __future__ import annotations

import inspect
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.managers.embed_types import PositionalEmbeds
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

from sglang_hyperdflash.serving.refusals import refuse_what_ends_a_server

VOCABULARY, HIDDEN = 100, 8
# Fields of a request with its tokens, and the value that the refusal names.
REFUSED = {
    "negative id": ({"input_ids": [5, -1, 7]}, "-1"),
    "id past the vocabulary": ({"input_ids": [5, 100, 7]}, "100"),
    "no int64": ({"input_ids": [5, 2**70]}, "1180591620717411303424"),
    "empty text": ({"text": "", "tokens": []}, "none"),
    "no session's id": ({"text": "", "tokens": [], "session_params": {"rid": "r"}}, "none"),
    # Without a processor SGLang ignores the image and runs the ids.
    "negative id with an image": ({"input_ids": [5, -1], "image_data": "image"}, "-1"),
    "embeddings by name": ({"input_ids": [5], "positional_embed_overrides": {"a": 1}}, "JSON"),
    "top logprobs": ({"input_ids": [5], "top_logprobs_num": 101}, "101"),
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
    "list of top logprobs": ({"text": "a", "tokens": [5], "top_logprobs_num": [2]}, "2"),
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


def test_every_request_is_checked_before_it_is_sent():
    """SGLang makes tokenized requests in two places, each after this check of its tokens."""
    manager = inspect.unwrap(TokenizerManager._tokenize_one_request)
    batch = inspect.unwrap(TokenizerManager._batch_tokenize_and_process)
    for function in (manager, batch):
        body = inspect.getsource(function)
        assert 0 < body.index("_validate_one_request(") < body.index("_create_tokenized_object(")
    assert inspect.getsource(TokenizerManager).count("._create_tokenized_object(") == 2

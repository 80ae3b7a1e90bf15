"""The table of sampling parameters is complete; its tests send what they say."""

import re

from tests.conftest import ROOT
from tests.unit.serving.parameters import PARAMETERS

# Made of others by SGLang, not sent by clients.
INTERNAL = {"stop_strs", "stop_regex_strs", "stop_str_max_len", "stop_regex_max_len"}
INTERNAL |= {"is_normalized", "ebnf_full_assistant"}
# Of OpenAI's requests: what is said to whom, and how the answer is sent.
NOT_SAMPLING = {"model", "prompt", "messages", "stream_options", "user"}
# SGLang's extensions of requests that change how they are served.
EXTENSIONS = {"min_tokens", "return_hidden_states", "return_sampling_mask"}


def openais(request: type, first: str) -> set[str]:
    """OpenAI's own parameters: SGLang declares them first, in OpenAI's order, ``user`` last."""
    names = list(request.model_fields)
    return set(names[names.index(first) : names.index("user") + 1])


def test_every_parameter_has_a_row():
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest, CompletionRequest
    from sglang.srt.sampling.sampling_params import SamplingParams

    own = set(SamplingParams.__struct_fields__) - INTERNAL
    legacy, chat = openais(CompletionRequest, "model"), openais(ChatCompletionRequest, "messages")
    assert {"best_of", "echo", "suffix"} <= legacy and "top_logprobs" in chat
    assert set(PARAMETERS) == own | (legacy | chat) - NOT_SAMPLING | EXTENSIONS


# These ask the cases of one table.
ASKING = {"test_answers_are_the_baselines", "test_a_processor_is_called_once_a_token"}


def test_every_row_names_a_test_of_a_file_that_sends_the_parameter():
    for name, (_, test) in PARAMETERS.items():
        path, function = test.split("::")
        assert f"def {function}(" in (ROOT / path).read_text(), name
        sends = ROOT / ("tests/engine/asking.py" if function in ASKING else path)
        assert re.search(rf"[\"']{name}[\"']|\b{name}=", sends.read_text()), test

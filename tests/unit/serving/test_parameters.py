"""The table of sampling parameters is complete; its tests send what they say."""

from __future__ import annotations

import ast
import inspect
import re
from functools import cache
from types import SimpleNamespace

import pytest

from sglang_hyperdflash.plugin import ALL_SEAMS
from tests.conftest import ROOT
from tests.unit.serving.parameters import PARAMETERS

# Made of others by SGLang, not sent by clients.
INTERNAL = {
    "stop_strs",
    "stop_regex_strs",
    "stop_str_max_len",
    "stop_regex_max_len",
    "is_normalized",
    "ebnf_full_assistant",
}
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
    from sglang.srt.entrypoints.openai.serving_completions import OpenAIServingCompletion
    from sglang.srt.sampling.sampling_params import SamplingParams

    own = set(SamplingParams.__struct_fields__) - INTERNAL
    for function in (
        ChatCompletionRequest.to_sampling_params,
        OpenAIServingCompletion._build_sampling_params,
    ):
        source = inspect.getsource(function)
        named = set(re.findall(r'^            "(\w+)": ', source, flags=re.MULTILINE))
        assert len(named) > 15
        assert named <= own
    legacy, chat = openais(CompletionRequest, "model"), openais(ChatCompletionRequest, "messages")
    assert {"best_of", "echo", "suffix"} <= legacy and "top_logprobs" in chat
    assert set(PARAMETERS) == own | (legacy | chat) - NOT_SAMPLING | EXTENSIONS


@cache
def definitions(path: str) -> dict[str, ast.stmt]:
    """What a module defines at its top, by name."""
    found: dict[str, ast.stmt] = {}
    for node in ast.parse((ROOT / path).read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            names = [n.id for t in node.targets for n in ast.walk(t) if isinstance(n, ast.Name)]
            found |= dict.fromkeys(names, node)
    return found


def source_of(path: str, function: str) -> str:
    """A test with all of its module that it uses: constants, helpers, fixtures."""
    module, wanted, seen = definitions(path), [function], {}
    while wanted:
        name = wanted.pop()
        if name in seen or name not in module:
            continue
        seen[name] = ast.unparse(module[name])
        for node in ast.walk(module[name]):
            if isinstance(node, ast.Name):
                wanted.append(node.id)
            elif isinstance(node, ast.arg):
                wanted.append(node.arg)
    return "\n".join(seen.values())


def test_every_row_names_a_test_that_sends_the_parameter():
    for name, (_, test) in PARAMETERS.items():
        path, function = test.split("::")
        assert function in definitions(path), name
        sent = re.search(rf"'{name}'|\b{name}=", source_of(path, function))
        assert sent, f"{test} never names {name}"


def test_a_test_that_never_names_a_parameter_is_noticed():
    source = source_of("tests/engine/test_api.py", "test_eos_ends_the_answer")
    assert "'ignore_eos'" in source and "'regex'" not in source


def test_only_sglangs_own_refusals_are_left():
    refused = {name for name, (served, _) in PARAMETERS.items() if served.startswith("refused")}
    assert refused == {"beam_width", "watermark", "return_hidden_states"}
    # No hook of ours looks at a request before it is admitted.
    assert not [seam for seam in ALL_SEAMS if "validate_dflash_request" in seam.target]


def test_sglang_itself_refuses_beams_with_speculation():
    from sglang.srt.beam_search.coordinator import BeamCoordinator

    names = [n for n, f in vars(BeamCoordinator).items() if inspect.isfunction(f)]
    source = "".join(inspect.getsource(getattr(BeamCoordinator, n)) for n in names)
    assert "Beam search is not supported with speculative decoding" in source


def test_sglang_itself_refuses_watermarks_at_the_start_of_a_plugins_algorithm(monkeypatch):
    from sglang.srt.arg_groups import validation_hook

    monkeypatch.setattr(validation_hook, "resolving_view", lambda arguments: arguments)
    arguments = SimpleNamespace(
        enable_watermark=True,
        device="cuda",
        watermark_config=None,
        watermark_key=None,
        watermark_key_b=None,
        watermark_context_window=4,
        watermark_mixing_probability=0.5,
        watermark_max_probability=1.0,
        watermark_default_enabled=False,
        watermark_enforce_all=False,
        enable_custom_logit_processor=False,
        sampling_backend=None,
        dllm_algorithm=None,
        disaggregation_mode="null",
        speculative_algorithm="HYPERDFLASH",
        pp_size=1,
        speculative_use_rejection_sampling=False,
    )
    with pytest.raises(ValueError, match=r"supports speculative algorithms .*'HYPERDFLASH'"):
        validation_hook.check_watermark_server_args(arguments)
    arguments.speculative_algorithm = None
    validation_hook.check_watermark_server_args(arguments)

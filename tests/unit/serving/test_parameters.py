"""The table of sampling parameters in docs/sampling.md is whole, and its tests exist."""

from __future__ import annotations

import inspect
import re

from sglang_hyperdflash.plugin import ALL_SEAMS
from tests.conftest import ROOT

# Made of others by SGLang, not sent by clients.
INTERNAL = {
    "stop_strs",
    "stop_regex_strs",
    "stop_str_max_len",
    "stop_regex_max_len",
    "is_normalized",
    "ebnf_full_assistant",
}
OPENAI = {"seed", "logprobs", "top_logprobs"}  # the others reach SGLang under its own names


def rows() -> dict[str, tuple[str, str]]:
    text = (ROOT / "docs" / "sampling.md").read_text()
    found = re.findall(r"^\| `(\w+)` \| ([^|]+) \| `([^`]+)` \|$", text, flags=re.MULTILINE)
    return {name: (served, test) for name, served, test in found}


def test_every_parameter_has_a_row():
    from sglang.srt.entrypoints.openai.protocol import ChatCompletionRequest
    from sglang.srt.sampling.sampling_params import SamplingParams

    source = inspect.getsource(ChatCompletionRequest.to_sampling_params)
    named = set(re.findall(r'^            "(\w+)": ', source, flags=re.MULTILINE))
    assert len(named) > 15
    expected = set(SamplingParams.__struct_fields__) - INTERNAL | OPENAI
    assert named <= expected
    assert set(rows()) == expected


def test_every_row_names_a_test_that_exists():
    for name, (_, test) in rows().items():
        path, function = test.split("::")
        assert f"def {function}(" in (ROOT / path).read_text(), name


def test_only_sglangs_own_refusals_are_left():
    refused = {name for name, (served, _) in rows().items() if served.startswith("refused")}
    assert refused == {"beam_width", "watermark"}
    # No hook of ours looks at a request before it is admitted.
    assert not [seam for seam in ALL_SEAMS if "validate_dflash_request" in seam.target]


def test_sglang_itself_refuses_beams_with_speculation():
    from sglang.srt.beam_search.coordinator import BeamCoordinator

    names = [n for n, f in vars(BeamCoordinator).items() if inspect.isfunction(f)]
    source = "".join(inspect.getsource(getattr(BeamCoordinator, n)) for n in names)
    assert "Beam search is not supported with speculative decoding" in source

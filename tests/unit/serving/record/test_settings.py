"""Which requests are recorded, and what is refused at start."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_hyperdflash.serving.record.settings import (
    RecordSetting,
    check_recording,
    read_record_setting,
)
from sglang_hyperdflash.tools.errors import HyperDFlashError
from tests.unit.serving.record.engine import Request


def setting(share: float, **more) -> RecordSetting:
    return RecordSetting(
        Path("store"), share, **{"budget": 1, "length": 4096, "context": 0.5} | more
    )


def test_the_share_is_a_stable_choice_near_its_rate():
    requests = [Request(f"{i:032x}", 3, 3, asked=None) for i in range(20_000)]
    few = [req.rid for req in requests if setting(0.05).wants(req)]
    assert few == [req.rid for req in requests if setting(0.05).wants(req)]
    assert 850 < len(few) < 1150  # five standard deviations
    # A larger share has all of a smaller one.
    assert set(few) < {req.rid for req in requests if setting(0.2).wants(req)}
    assert not any(setting(0.0).wants(req) for req in requests)
    assert all(setting(1.0).wants(req) for req in requests)


def test_a_request_decides_for_itself():
    for share in (0.0, 1.0):
        assert setting(share).wants(Request("a", 3, 3, asked=True))
        assert not setting(share).wants(Request("a", 3, 3, asked=False))
        # Only true and false are answers; custom parameters may be anything.
        for other in ("yes", 1, None):
            assert setting(share).wants(Request("a", 3, 3, asked=other)) == bool(share)
        req = Request("a", 3, 3)
        for params in (["hyperdflash_record"], {}, None):
            req.sampling_params.custom_params = params
            assert setting(share).wants(req) == bool(share)


@pytest.mark.parametrize(
    "name", ["multimodal_inputs", "input_embeds", "positional_embed_overrides"]
)
def test_a_prompt_that_is_more_than_tokens_is_never_recorded(name):
    req = Request("a", 3, 3)
    setattr(req, name, object())
    assert not setting(1.0).wants(req)


def test_a_request_for_no_token_is_never_recorded():
    assert not setting(1.0).wants(Request("a", 3, 0))


@pytest.mark.parametrize(
    ("prompt", "cached", "context", "expected"),
    [
        (100, 0, 0.5, range(0, 4096)),
        (100, 50, 0.5, range(50, 4146)),
        (100, 51, 0.5, None),
        (100, 99, 0.0, range(99, 4195)),
        (100, 1, 1.0, None),
        # Of a long prompt, the last 2048 tokens are its context.
        (10_000, 0, 0.5, range(7952, 12048)),
        (10_000, 8976, 0.5, range(8976, 13072)),
        (10_000, 8977, 0.5, None),
        (10_000, 7952, 1.0, range(7952, 12048)),
    ],
)
def test_what_is_cached_decides_on_the_start(prompt, cached, context, expected):
    assert setting(1.0, context=context).range(prompt, cached) == expected


def test_nothing_is_recorded_unless_a_folder_is_named(monkeypatch, tmp_path):
    assert read_record_setting() is None
    monkeypatch.setenv("HYPERDFLASH_RECORD", " ")
    assert read_record_setting() is None
    monkeypatch.setenv("HYPERDFLASH_RECORD", str(tmp_path))
    assert read_record_setting() == RecordSetting(tmp_path, 0.05, 100 << 30, 4096, 0.0)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("SHARE", "5%", "HYPERDFLASH_RECORD_SHARE must be a number from 0 to 1, found '5%'"),
        ("SHARE", "5", "HYPERDFLASH_RECORD_SHARE must be a number from 0 to 1, found '5'"),
        ("GIB", "0", "HYPERDFLASH_RECORD_GIB must be a number above 0, found '0'"),
        ("LENGTH", "8", "HYPERDFLASH_RECORD_LENGTH must be a number of tokens of at least 16"),
        ("CONTEXT", "-1", "HYPERDFLASH_RECORD_CONTEXT must be a number from 0 to 1, found '-1'"),
    ],
)
def test_a_wrong_variable_is_refused(monkeypatch, tmp_path, name, value, message):
    monkeypatch.setenv("HYPERDFLASH_RECORD", str(tmp_path))
    monkeypatch.setenv(f"HYPERDFLASH_RECORD_{name}", value)
    with pytest.raises(HyperDFlashError, match=message):
        read_record_setting()


def test_a_server_that_cannot_record_is_refused(monkeypatch, tmp_path):
    arguments = SimpleNamespace(
        disaggregation_mode="null",
        model_path=str(tmp_path),
        speculative_draft_model_path="owner/drafter",
    )
    check_recording(arguments, "layers")  # nothing is recorded
    monkeypatch.setenv("HYPERDFLASH_RECORD", str(tmp_path / "store"))
    with pytest.raises(HyperDFlashError, match="reads captured layers"):
        check_recording(arguments, "layers")
    with pytest.raises(HyperDFlashError, match=r"HYPERDFLASH_RECORD .* lies inside the target"):
        check_recording(arguments, "pre_hc_head")
    arguments.model_path = "owner/target"
    check_recording(arguments, "pre_hc_head")
    arguments.disaggregation_mode = "decode"
    with pytest.raises(HyperDFlashError, match="found --disaggregation-mode decode"):
        check_recording(arguments, "pre_hc_head")

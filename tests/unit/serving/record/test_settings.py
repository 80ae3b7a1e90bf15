"""Which requests are recorded, and what is refused at start."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from sglang_hyperdflash.serving.record import settings
from sglang_hyperdflash.serving.record.settings import RecordSetting
from sglang_hyperdflash.tools.errors import HyperDFlashError
from tests.unit.serving.record.engine import Request


def setting(share: float) -> RecordSetting:
    return RecordSetting(Path("store"), share, budget=1, length=4096, context=0.5)


def test_the_share_is_a_stable_choice_near_its_rate():
    requests = [Request(f"{i:032x}", 3, 3, asked=None) for i in range(4000)]

    def chosen(share: float) -> set[str]:
        return {req.rid for req in requests if setting(share).wants(req)}

    few = chosen(0.05)
    assert few == chosen(0.05) < chosen(0.2), "a larger share has all of a smaller one"
    assert 130 < len(few) < 270  # five standard deviations
    assert not chosen(0.0) and len(chosen(1.0)) == len(requests)


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_a_request_decides_for_itself_with_true_or_false(share):
    assert setting(share).wants(Request("a", 3, 3, asked=True))
    assert not setting(share).wants(Request("a", 3, 3, asked=False))
    req = Request("a", 3, 3)
    for params in (["hyperdflash_record"], {}, None, {"hyperdflash_record": 1 - share}):
        req.sampling_params.custom_params = params
        assert setting(share).wants(req) == bool(share), params
    # Prompts of tokens with an answer are recorded, no others.
    for name in ("multimodal_inputs", "input_embeds", "positional_embed_overrides"):
        req = Request("a", 3, 3)
        setattr(req, name, object())
        assert not setting(share).wants(req)
    assert not setting(share).wants(Request("a", 3, 0))


def test_variables_are_read_and_refused_by_name(monkeypatch, tmp_path):
    assert settings.read_record_setting() is None
    monkeypatch.setenv("HYPERDFLASH_RECORD", str(tmp_path))
    assert settings.read_record_setting() == RecordSetting(tmp_path, 0.05, 100 << 30, 4096, 0.0)
    for part, value in (("SHARE", "5%"), ("SHARE", "5"), ("GIB", "0"), ("LENGTH", "8")):
        name = f"HYPERDFLASH_RECORD_{part}"
        with monkeypatch.context() as patch, pytest.raises(HyperDFlashError, match=name):
            patch.setenv(name, value)
            settings.read_record_setting()


def test_a_server_that_cannot_record_is_refused(monkeypatch, tmp_path):
    arguments = SimpleNamespace(
        disaggregation_mode="null",
        model_path="owner/target",
        speculative_draft_model_path="owner/drafter",
    )
    settings.check_recording(None, arguments, "layers")  # nothing is recorded
    asked = replace(setting(1.0), folder=tmp_path / "store")
    settings.check_recording(asked, arguments, "pre_hc_head")
    with pytest.raises(HyperDFlashError, match="layers"):
        settings.check_recording(asked, arguments, "layers")
    for name, value, said in (
        ("model_path", str(tmp_path), "the target"),
        ("disaggregation_mode", "decode", "--disaggregation-mode"),
    ):
        with monkeypatch.context() as patch, pytest.raises(HyperDFlashError, match=said):
            patch.setattr(arguments, name, value)
            settings.check_recording(asked, arguments, "pre_hc_head")

"""Targets that collapse their residual inside: exposed, they compute the same and hand it out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from sglang_hyperdflash.targets.loaded import CAPTURE_FOLDER, EXPOSED, expose_residual
from tests.unit.targets import exposed_models
from tests.unit.targets.exposed_models import MODES, ROWS, D, M
from tests.unit.targets.test_kinds import hy_v4


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> dict:
    folder = tmp_path_factory.mktemp("exposed")
    hy_v4().save_pretrained(folder)
    return exposed_models.examined(folder)


def test_sglangs_own_model_hands_out_its_residual(found):
    for mode in MODES:
        one = found["modes"][mode]
        assert one["logits"], mode
        assert one["before"] == [ROWS[mode], D] and one["shape"] == [ROWS[mode], M * D], mode
        if mode != "idle":
            # The reducer's formula of what is handed out is the state that the model goes on with.
            assert one["error"] < 1e-6, mode
            assert one["spread"] > 0.02, mode


def test_the_body_returns_the_pair_that_graph_runners_know(found):
    assert found["body"] == [[ROWS["decode"], D], [ROWS["decode"], M * D]]
    assert found["replayed"]
    assert found["embeddings"] and found["hc_head"]


def test_another_algorithm_leaves_the_model_alone(found):
    assert found["untouched"]


class HYV4ForCausalLM(nn.Module):
    """Not built as SGLang's; only its name is."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Linear(1, 1)


def runner(**changes) -> SimpleNamespace:
    aux = SimpleNamespace(dflash_use_aux_hidden_state=changes.pop("aux", False))
    options = {"spec_algorithm": "HYPERDFLASH", "is_draft_worker": False, **changes}
    return SimpleNamespace(model=HYV4ForCausalLM(), spec_aux_config=aux, **options)


def test_only_our_target_is_exposed(monkeypatch):
    for changes in ({"spec_algorithm": None}, {"is_draft_worker": True}, {"aux": True}):
        assert expose_residual(None, runner(**changes)) is None
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'hc_head'"):
        expose_residual(None, runner())
    monkeypatch.setenv(CAPTURE_FOLDER, "/nowhere")
    with pytest.raises(AttributeError, match="'Linear' object has no attribute 'hc_head'"):
        expose_residual(None, runner(spec_algorithm=None))


def test_the_classes_are_sglangs():
    from sglang.srt.models.registry import ModelRegistry

    for name in EXPOSED:
        assert ModelRegistry.resolve_model_cls(name)[0].__name__ == name

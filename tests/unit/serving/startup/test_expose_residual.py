"""Targets that collapse their residual inside: exposed, they compute the same and hand it out."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sglang_hyperdflash.serving.scheduler.capture_rows import CAPTURE_FOLDER
from sglang_hyperdflash.serving.startup.expose_residual import (
    EXPOSED,
    expose_hy_v4,
    expose_residual,
)
from sglang_hyperdflash.tools.errors import SeamError
from tests.unit.serving.startup import exposed_models
from tests.unit.serving.startup.exposed_models import MODES, ROWS, D, M
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
    assert "returned without reading its residual" in found["bypassed"]
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
    with pytest.raises(SeamError, match=r"seam Linear\.hc_head changed"):
        expose_residual(None, runner())
    monkeypatch.setenv(CAPTURE_FOLDER, "/nowhere")
    with pytest.raises(SeamError, match=r"seam Linear\.hc_head changed"):
        expose_residual(None, runner(spec_algorithm=None))


def test_a_changed_model_is_named():
    model = nn.Module()
    model.model = nn.Module()
    with pytest.raises(SeamError, match=r"seam Module\.hc_head changed"):
        expose_hy_v4(model)
    model.model.hc_head = nn.Identity()
    model.logits_processor = nn.Identity()
    with pytest.raises(SeamError, match=r"Identity\.forward changed: .*hidden_states_before_norm"):
        expose_hy_v4(model)


def test_a_body_that_never_reads_its_residual_is_an_error():
    class Processor(nn.Module):
        def forward(self, input_ids, hidden_states, hidden_states_before_norm=None):
            return hidden_states

    class Body(nn.Module):
        def forward(self, hidden, forward_batch=None):
            return hidden

    model = nn.Module()
    model.model = Body()
    model.model.hc_head = nn.Identity()
    model.logits_processor = Processor()
    expose_hy_v4(model)
    with pytest.raises(RuntimeError, match="Body returned without reading its residual"):
        model.model(torch.zeros(1, 2))


def test_the_classes_are_sglangs():
    from sglang.srt.models.registry import ModelRegistry

    for name in EXPOSED:
        assert ModelRegistry.resolve_model_cls(name)[0].__name__ == name

"""Targets that collapse their residual inside: exposed, they compute the same and hand it out.

``tests/engine/test_exposed.py`` does it with SGLang's own HY-V4.
"""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from sglang_hyperdflash.targets import loaded

M, D = 4, 8


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.hc_head_fn = nn.Linear(M * D, M)
        self.hc_head_base, self.hc_head_scale = torch.zeros(M), torch.ones(1)

    def forward(self, paths: torch.Tensor) -> torch.Tensor:
        return paths.mean(1)


class Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed_tokens, self.hc_head = nn.Embedding(8, M * D), Head()

    def forward(self, ids: torch.Tensor, fail: bool = False) -> torch.Tensor:
        state = self.hc_head(self.embed_tokens(ids).unflatten(-1, (M, D)))
        if fail:
            raise RuntimeError("a pass that failed")
        return state * 2


class Logits(nn.Module):
    def forward(self, ids, hidden, *, hidden_states_before_norm=None):
        return hidden, hidden_states_before_norm


class HYV4ForCausalLM(nn.Module):
    """What of SGLang's is hooked: its name, a body that ends in a collapse, a logits processor."""

    def __init__(self) -> None:
        super().__init__()
        self.model, self.logits_processor = Body(), Logits()

    def forward(self, ids: torch.Tensor, **options):
        return self.logits_processor(ids, self.model(ids, **options))


def hooked(aux: bool = False, **changes) -> HYV4ForCausalLM:
    config = SimpleNamespace(dflash_use_aux_hidden_state=aux)
    options = {"spec_algorithm": "HYPERDFLASH", "is_draft_worker": False, **changes}
    model = HYV4ForCausalLM()
    runner = SimpleNamespace(model=model, spec_aux_config=config, **options)
    assert loaded.expose_residual(None, runner) is None
    return model


@torch.no_grad()
def test_an_exposed_model_computes_the_same_and_hands_out_its_residual():
    model, ids = hooked(), torch.arange(5)
    paths = model.model.embed_tokens(ids)
    expected = paths.unflatten(-1, (M, D)).mean(1) * 2
    with pytest.raises(RuntimeError):
        model(ids + 1, fail=True)
    hidden, residual = model(ids)
    assert torch.equal(hidden, expected) and torch.equal(residual, paths)
    # Graph runners call the body's forward, and replace it by what it returned while they replay.
    pair = model.model.forward(ids)
    model.model.forward = lambda *_: pair
    hidden, residual = model(ids + 1)
    assert torch.equal(hidden, expected) and torch.equal(residual, paths)
    assert model.get_input_embeddings() is model.model.embed_tokens
    assert torch.equal(loaded.target_hc_head(model).fn, model.model.hc_head.hc_head_fn.weight)


def test_only_our_target_is_exposed(monkeypatch):
    def exposed(**changes) -> bool:
        return hooked(**changes)(torch.arange(5))[1] is not None

    assert exposed() and not exposed(spec_algorithm=None)
    assert not exposed(is_draft_worker=True) and not exposed(aux=True)
    monkeypatch.setenv(loaded.CAPTURE_FOLDER, "/nowhere")
    assert exposed(spec_algorithm=None)


@pytest.mark.heavy
def test_the_classes_are_sglangs():
    from sglang.srt.models.registry import ModelRegistry

    for name in loaded.EXPOSED:
        model = ModelRegistry.resolve_model_cls(name)[0]
        assert model.__name__ == name and not hasattr(model, "get_input_embeddings")

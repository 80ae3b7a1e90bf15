"""Online features from a transformers target equal the portable core's."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.objective import Objective
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.samples import FeatureCache, OnlineFeatures, Sample
from sglang_hyperdflash.training.trainer import Trainer
from sglang_hyperdflash.training.transformers_target import TransformersTarget


def test_both_targets_give_the_same_states(target_dir):
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, 1300, (n,), generator=g).tolist() for n in (9, 40)]
    samples = [Sample.continuation(row, 3) for row in rows]
    ours, theirs = LocalTarget(target_dir), TransformersTarget(str(target_dir))
    expected = OnlineFeatures(ours, samples).states([0, 1])
    found = OnlineFeatures(theirs, samples).states([0, 1])
    for name in ("residual", "final"):
        wanted, got = getattr(expected, name), getattr(found, name)
        assert (got - wanted).abs().max() < 1e-4 * wanted.abs().max(), name
    for a, b in zip(theirs.hc_head, ours.hc_head, strict=True):
        assert torch.equal(a.float(), b)
    assert theirs.lm_head.weight.shape == ours.lm_head.weight.shape
    assert not any(p.requires_grad for p in theirs.parameters())


def test_a_target_in_bf16_teaches_a_drafter(target_dir, drafter_dir, tmp_path):
    """As on a GPU. Found as: fp32 states met the target's bf16 head, an error at the first step."""
    target = TransformersTarget(str(target_dir), dtype=torch.bfloat16)
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, 1300, (n,), generator=g).tolist() for n in (20, 40)]
    cache = FeatureCache(target, [Sample.continuation(row, 3) for row in rows])
    recipe = Recipe(steps=2, batch=2, warmup_steps=1, every=2, objective=Objective(loss="ce_kl"))
    drafter, work = Drafter.load(drafter_dir), tmp_path / "work"
    record = Trainer(drafter, target, cache, {"same": cache}, recipe, work).run(tmp_path / "out")
    assert record["tau"] >= 1.0 and record["tau_sampled"] >= 1.0 and record["ce"] > 0


def test_a_model_without_hc_head_is_refused(monkeypatch):
    class Plain(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.model, self.config = torch.nn.Module(), None

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", lambda *_, **__: Plain())
    with pytest.raises(HyperDFlashConfigError, match=r"has no model.hc_head"):
        TransformersTarget("any")

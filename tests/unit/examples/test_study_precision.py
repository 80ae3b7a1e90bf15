"""The study of precisions on a few prompts and steps."""

from __future__ import annotations

import json
import sys

import pytest
import torch

from sglang_hyperdflash.training import trainer as trainer_module
from sglang_hyperdflash.training.vocabulary import vocabulary_logits
from tests.conftest import EXAMPLE


@pytest.fixture
def precision(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import corpus
    import own_answers
    import study_precision

    monkeypatch.setattr(corpus, "PER_FAMILY", {"train": 20, "held_out": 4})
    monkeypatch.setattr(corpus, "SCRAMBLED_PROMPTS", {"train": 60, "held_out": 20})
    monkeypatch.setattr(own_answers.write_answers, "__defaults__", (2, 2))
    return study_precision


@pytest.mark.slow
def test_every_choice_is_trained_on_its_own_states_and_once(precision, tmp_path, monkeypatch):
    out, used = tmp_path / "out.json", []
    whole = precision.Trainer.accumulate

    def accumulate(self, step):
        identity = getattr(self.train, "identity", None)
        with trainer_module.bf16_products(self.device, False):
            used.append((torch.is_autocast_enabled("cpu"), identity and identity.fp8))
        return whole(self, step)

    monkeypatch.setattr(precision.Trainer, "accumulate", accumulate)
    options = ["--work", str(tmp_path / "work"), "--out", str(out), "--per-kind", "2"]
    options += ["--steps", "2", "--seeds", "0"]
    monkeypatch.setattr(sys, "argv", ["study_precision.py", *options])
    precision.main()
    two = [(False, None), (False, False), (True, False), (True, True)]
    assert used == [each for each in two for _ in range(2)]
    found = json.loads(out.read_text())
    assert list(found["summary"]) == list(map(str, precision.CHOICES))
    losses = [seeds["0"]["loss"] for seeds in found["records"].values()]
    assert len(set(losses)) == 4 and max(losses) < 1.01 * min(losses)
    assert {len(seeds["0"]["held_out"]) for seeds in found["records"].values()} == {8}
    used.clear()
    precision.main()
    assert used == [] and json.loads(out.read_text())["records"] == found["records"]


def test_products_of_a_gpu_are_of_bf16_operands_with_fp32_sums(precision):
    torch.manual_seed(0)
    head = torch.nn.Linear(64, 300, bias=False).requires_grad_(False)
    states = torch.randn(5, 64, requires_grad=True)
    with precision.gpu_products():
        with trainer_module.bf16_products(torch.device("cpu"), False):
            found = vocabulary_logits(head, states)
        found.sum().backward()
    rounded = states.detach().bfloat16().float() @ head.weight.bfloat16().float().T
    torch.testing.assert_close(found, rounded)
    assert found.dtype == torch.float32 and states.grad is not None
    assert not torch.equal(rounded, head(states))


def test_the_ratio_of_a_choice_is_paired_by_seed(precision):
    def seeds(*taus: float) -> dict:
        return {str(i): {"tau": tau, "tau_sampled": 2.0} for i, tau in enumerate(taus)}

    rows = precision.summary({"one": seeds(2.0, 4.0), "other": seeds(2.2, 3.6)})
    assert rows["one"] == {"tau": 3.0, "tau_sampled": 2.0}
    assert rows["other"]["tau_ratio"] == [1.0, 0.1]
    assert rows["other"]["tau_sampled_ratio"] == [1.0, 0.0]
    assert "tau" in precision.summary({"one": seeds(2.0), "other": seeds(2.2)})["other"]

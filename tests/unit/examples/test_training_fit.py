"""What a training step needs: the count on tensors without data is what a real step keeps."""

from __future__ import annotations

import importlib

import pytest

from sglang_hyperdflash.training.drafter import Drafter
from tests.conftest import ROOT

PATH = ROOT / "examples" / "recipes" / "v4_training_fit.py"


@pytest.fixture
def fit(monkeypatch):
    monkeypatch.syspath_prepend(str(PATH.parent))
    return importlib.import_module(PATH.stem)


def test_counted_activations_are_those_of_a_real_step(fit):
    raw = fit.config_of(2, 8)
    raw |= {"hidden_size": 64, "vocab_size": 90, "intermediate_size": 192, "head_dim": 16}
    raw["hyperdflash_config"]["target"] |= {"hidden_size": 64, "vocab_size": 90}
    raw["hyperdflash_config"]["dependency"]["top_k"] = 9
    size = {"batch": 2, "sequence": 40, "blocks": 5}
    step = fit.count(raw, **size)
    drafter = Drafter(raw)
    with fit.counted(drafter) as saved:
        fit.forward(drafter, **size).float().square().mean().backward()
    assert step.parameters == sum(p.numel() for p in drafter.parameters())
    # The loss of this test keeps a few rows more.
    assert saved[0] == pytest.approx(step.saved, rel=0.02)
    # Twice the blocks: about twice the rows' share, and attention over more keys.
    more = fit.count(raw, **size | {"blocks": 10})
    assert 1.3 * step.saved < more.saved < 2.5 * step.saved
    assert more.flops > 1.5 * step.flops


def test_the_stored_table_is_what_the_command_says_now(fit, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["v4_training_fit.py"])
    fit.main()
    stored = (ROOT / "eval" / "results" / "training_fit" / "report.md").read_text()
    assert capsys.readouterr().out.strip() in stored

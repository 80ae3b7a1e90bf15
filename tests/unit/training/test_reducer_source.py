"""What a drafter can read of its target: the residual, or the means of layers."""

from __future__ import annotations

import pytest
import torch

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.draft.reducer import reducer_source
from sglang_hyperdflash.targets.files import TargetFacts
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import Drafter, DrafterShape, draft_config
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.samples import FeatureCache, OnlineFeatures, Sample, States
from sglang_hyperdflash.training.trainer import Trainer
from tests.transformers_target import TransformersTarget

LAYERS = (1, 3)
SMALL = {"layers": 1, "heads": 2, "kv_heads": 1, "head_dim": 32, "intermediate_size": 64}


@pytest.fixture(scope="module")
def samples():
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, 1300, (n,), generator=g).tolist() for n in (12, 30)]
    return [Sample.continuation(row, 4) for row in rows]


def new_drafter(target, **shape) -> Drafter:
    facts = TargetFacts.from_config(target.config.to_dict())
    return Drafter(draft_config(facts, target.hc_head, DrafterShape(**SMALL, **shape), 4))


def test_layers_are_the_means_of_the_paths_after_them(target_dir, target, samples):
    """Against transformers' own hidden states, and in the cache as online."""
    theirs = TransformersTarget(str(target_dir))
    expected = OnlineFeatures(theirs, samples, LAYERS).states([0, 1]).layers
    assert expected.shape == (2, 30, 2 * 256)
    found = OnlineFeatures(target, samples, LAYERS).states([0, 1]).layers
    assert (found - expected).abs().max() < 1e-4 * expected.abs().max()
    cached = FeatureCache(target, samples, dtype=torch.float32, layer_ids=LAYERS)
    torch.testing.assert_close(cached.states([0, 1]).layers, found, rtol=1e-5, atol=1e-4)
    outputs = theirs.model(
        input_ids=torch.tensor([samples[1].tokens]), output_hidden_states=True
    ).hidden_states
    # hidden_states[i + 1] is what layer i gave, as [b, S, m, d].
    mean = outputs[LAYERS[0] + 1].mean(-2)
    assert (found[1, :, :256] - mean[0]).abs().max() < 1e-4 * mean.abs().max()


def test_a_drafter_of_layers_trains(target, samples, tmp_path):
    drafter = new_drafter(target, reducer="fc", layer_ids=LAYERS)
    cache = FeatureCache(target, samples, layer_ids=drafter.config.captured_layers)
    recipe = Recipe(steps=2, batch=2, anchors=2, every=2, warmup_steps=1)
    before = drafter.fc.weight.detach().clone()
    Trainer(drafter, target, cache, {}, recipe, tmp_path).run(tmp_path / "out")
    assert Drafter.load(tmp_path / "out").config.source == "layers"
    assert not torch.equal(drafter.fc.weight, before)


def test_states_without_the_asked_layers_are_refused(target):
    drafter = new_drafter(target, reducer="fc", layer_ids=LAYERS)
    states = States.without_layers(torch.zeros(1, 3, 1024))
    with pytest.raises(HyperDFlashConfigError, match=r"reads layers \[1, 3\] \(512 columns\)"):
        reducer_source(drafter.config, states.residual, states.layers)


@pytest.mark.parametrize(
    "options, message",
    [
        ("--layer-ids 1 2 --reducer hc_gate", "a gate reads residual paths alone"),
        ("--layer-ids 1 9", "between 0 and 7, found [1, 9]"),
    ],
)
def test_init_refuses_what_cannot_work(target_dir, tmp_path, capsys, options, message):
    out = tmp_path / "draft"
    assert main(["init", "--target", str(target_dir), "--out", str(out), *options.split()]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()

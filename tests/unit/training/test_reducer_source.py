"""What a drafter can read of its target: the residual, or the means of layers."""

import pytest
import torch

from sglang_hyperdflash.draft.reducer import reducer_source
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import Drafter
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.samples import OnlineFeatures, States
from sglang_hyperdflash.training.trainer import Trainer
from tests.transformers_target import TransformersTarget
from tests.unit.training.conftest import FeatureCache, answers
from tests.unit.training.streams import new_drafter

LAYERS = (1, 3)
SAMPLES = answers(12, 300, prompt=4)


def test_states_are_those_of_transformers_in_the_cache_as_online(target_dir, target):
    """Layers are the means of the paths after them."""
    theirs = TransformersTarget(str(target_dir))
    expected, online = (OnlineFeatures(t, SAMPLES, LAYERS).states([0, 1]) for t in (theirs, target))
    cached = FeatureCache(target, SAMPLES, dtype=torch.float32, layer_ids=LAYERS).states([0, 1])
    for name, width in (("residual", 4), ("layers", 2)):
        ours, other, wanted = (getattr(each, name) for each in (online, cached, expected))
        assert wanted.shape == (2, 300, width * 256)
        assert (ours - wanted).abs().max() < 1e-4 * wanted.abs().max()
        torch.testing.assert_close(other, ours, rtol=1e-4, atol=1e-3)
    tokens = torch.tensor([SAMPLES[1].tokens])
    whole = theirs.model(input_ids=tokens, output_hidden_states=True).hidden_states
    mean = whole[LAYERS[0] + 1].mean(-2)  # [b, S, m, d]: what layer i gave is at i + 1
    assert (online.layers[1, :, :256] - mean[0]).abs().max() < 1e-4 * mean.abs().max()
    final = theirs.features(tokens)[0]
    for ours in (target.final(expected.residual[1:]), target.features(tokens)[0]):
        torch.testing.assert_close(ours, final, rtol=1e-3, atol=1e-4)
    for one, other in zip(theirs.hc_head, target.hc_head, strict=True):
        assert torch.equal(one.float(), other)


def test_a_drafter_of_layers_trains_and_asks_for_its_layers(target, tmp_path):
    drafter = new_drafter(target, reducer="fc", layer_ids=LAYERS)
    cache = FeatureCache(target, SAMPLES, layer_ids=drafter.config.captured_layers)
    recipe = Recipe(steps=2, batch=2, anchors=2, every=2, warmup_steps=1)
    before = drafter.fc.weight.detach().clone()
    Trainer(drafter, target, cache, {}, recipe, tmp_path).run(tmp_path / "out")
    assert Drafter.load(tmp_path / "out").config.source == "layers"
    assert not torch.equal(drafter.fc.weight, before)
    states = States.without_layers(torch.zeros(1, 3, 1024))
    with pytest.raises(HyperDFlashConfigError, match=r"layers \[1, 3\]"):
        reducer_source(drafter.config, states.residual, states.layers)

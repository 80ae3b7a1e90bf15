"""Fusion: its formula, its start, which feature a block gets, its config and checkpoint."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from safetensors.torch import load_file, save_file

from sglang_hyperdflash.draft.algorithm import propose_block
from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.draft.fusion import FeatureFusion
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.drafter import Drafter, name_for_dflash
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.replay import Replay, last_features
from sglang_hyperdflash.training.samples import FeatureCache, Sample, collate

D = 8


@pytest.fixture(scope="module")
def target(target_dir):
    return LocalTarget(target_dir)


def with_fusion(drafter: Drafter) -> Drafter:
    """The same drafter with fusion, nothing of it as it starts."""
    raw = json.loads(json.dumps(drafter.raw))
    raw["hyperdflash_config"]["fusion"] = True
    new = Drafter(raw)
    new.load_state_dict(drafter.state_dict(), strict=False)
    torch.manual_seed(3)
    with torch.no_grad():
        for parameter in new.fusion.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.05)
    return new.eval()


@torch.no_grad()
def test_a_row_starts_at_feature_and_anchor():
    torch.manual_seed(1)
    fusion, anchor, feature = FeatureFusion(D, 1e-6), torch.randn(3, D), torch.randn(3, D)
    fusion.enorm.normal_()
    fusion.h_proj.weight.normal_()
    for row in range(3):
        e = anchor[row] / (anchor[row].pow(2).mean() + 1e-6).sqrt() * fusion.enorm
        expected = fusion.h_proj.weight @ feature[row] + fusion.e_proj.weight @ e
        torch.testing.assert_close(fusion(anchor, feature)[row], expected)
    assert fusion(anchor.bfloat16(), feature.bfloat16()).dtype == torch.bfloat16


def test_a_new_fusion_hands_the_feature_on_and_can_learn():
    fusion = FeatureFusion(D, 1e-6)
    feature = torch.randn(2, D)
    found = fusion(torch.zeros(2, D), feature)
    torch.testing.assert_close(found, feature)
    fusion(torch.randn(2, D), feature)[:, 0].sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in fusion.parameters())


def test_a_block_gets_the_feature_before_its_anchor_and_none_of_another_sample():
    context = torch.arange(10.0).view(1, 10, 1).expand(1, 10, D)
    anchors, starts = torch.tensor([[3, 0, 6, 7]]), torch.tensor([[0, 0, 6, 6]])
    found = last_features(context, anchors, starts)
    assert found[0, :, 0].tolist() == [2.0, 0.0, 0.0, 6.0]


@torch.no_grad()
def test_the_trainer_drafts_as_the_plain_decoder_does(target, drafter_dir):
    """Every anchor of an answer at once, and each alone."""
    drafter = with_fusion(Drafter.load(drafter_dir))
    torch.manual_seed(2)
    tokens = torch.randint(5, 900, (24,)).tolist()
    sample = Sample.continuation(tokens, 8)
    source = FeatureCache(target, [sample], dtype=torch.float32)
    anchors = torch.tensor([[9, 13, 16]])
    keep = torch.ones_like(anchors, dtype=torch.bool)
    found = Replay(drafter, target).draft(collate([sample]), source.states([0]), anchors, keep)
    alone = partial(propose_block, target, drafter)
    for row, anchor in enumerate(anchors[0].tolist()):
        assert found[0, row].tolist() == alone(tokens[: anchor + 1])
    plain = Drafter.load(drafter_dir).eval()
    other = Replay(plain, target).draft(collate([sample]), source.states([0]), anchors, keep)
    assert not torch.equal(found, other), "the fusion must change drafts to say anything"


def test_a_checkpoint_holds_it_and_an_older_one_has_none(drafter_dir, tmp_path):
    drafter = with_fusion(Drafter.load(drafter_dir))
    drafter.save(tmp_path / "fused")
    weights = load_file(tmp_path / "fused" / "model.safetensors")
    assert weights["fusion.h_proj.weight"].dtype == torch.bfloat16
    assert weights["fusion.enorm"].dtype == torch.float32
    again = Drafter.load(tmp_path / "fused")
    torch.testing.assert_close(again.fusion.enorm, drafter.fusion.enorm)
    assert load_config(tmp_path / "fused").fusion
    del weights["fusion.e_proj.weight"]
    save_file(weights, tmp_path / "fused" / "model.safetensors")
    with pytest.raises(HyperDFlashConfigError, match=r"missing: fusion\.e_proj\.weight"):
        Drafter.load(tmp_path / "fused")
    raw = json.loads((tmp_path / "fused" / "config.json").read_text())
    raw["hyperdflash_config"]["fusion"] = "yes"
    (tmp_path / "fused" / "config.json").write_text(json.dumps(raw))
    with pytest.raises(HyperDFlashConfigError, match=r"hyperdflash_config\.fusion"):
        load_config(tmp_path / "fused")


def test_dflash_does_not_serve_it(tmp_path, drafter_dir):
    drafter = with_fusion(Drafter.load(drafter_dir))
    raw = drafter.raw
    own = raw["hyperdflash_config"]
    own |= {"source": "layers", "reducer": "fc", "gate": "none", "path_norm": False}
    own.pop("dependency", None)
    raw["dflash_config"]["target_layer_ids"] = [1]
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(HyperDFlashConfigError, match="leave out this drafter's fusion"):
        name_for_dflash(tmp_path)

"""Online features from a transformers target equal the portable core's."""

from __future__ import annotations

import torch

from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.samples import OnlineFeatures, Sample
from tests.transformers_target import TransformersTarget


def test_both_targets_give_the_same_states(target_dir):
    g = torch.Generator().manual_seed(0)
    rows = [torch.randint(10, 1300, (n,), generator=g).tolist() for n in (9, 40)]
    samples = [Sample.continuation(row, 3) for row in rows]
    ours, theirs = LocalTarget(target_dir), TransformersTarget(str(target_dir))
    expected = OnlineFeatures(ours, samples).states([0, 1])
    found = OnlineFeatures(theirs, samples).states([0, 1])
    wanted, got = expected.residual, found.residual
    assert (got - wanted).abs().max() < 1e-4 * wanted.abs().max()
    final = theirs.features(torch.tensor([rows[1]]))[0]
    torch.testing.assert_close(ours.final(wanted[1:]), final, rtol=1e-3, atol=1e-4)
    for a, b in zip(theirs.hc_head, ours.hc_head, strict=True):
        assert torch.equal(a.float(), b)
    assert theirs.lm_head.weight.shape == ours.lm_head.weight.shape
    assert not any(p.requires_grad for p in theirs.parameters())

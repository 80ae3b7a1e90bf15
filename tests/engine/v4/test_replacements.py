"""The index's scores against products, no server; ``test_golden`` compares what they choose."""

import torch
import torch.nn.functional as F

from tests.engine.v4 import latents, sparse
from tests.engine.v4.golden import rounded_index

PAGE = 64


def test_index_scores_are_weighted_rectified_products():
    """The Hadamard transform of both sides changes no product; fp8 does, by its rounding alone."""
    torch.manual_seed(0)
    rows, heads, keys = 5, 4, 100
    angles = torch.arange(512)[:, None] / 10000 ** (torch.arange(32) / 32)
    freqs = torch.polar(torch.ones_like(angles), angles)
    q, weight = torch.randn(rows, heads, 128), torch.randn(rows, heads)
    k, position = torch.randn(keys, 128), torch.randint(512, (rows,))
    q_fp8, weights = latents.fused_q_indexer_rope_hadamard_quant(q, weight, 0.5, freqs, position)
    cache = torch.zeros(2, PAGE * 132, dtype=torch.uint8)
    latents.store_index(k, torch.arange(keys), cache, PAGE)
    lengths, table = torch.tensor([100, 1, 64, 65, 99]), torch.arange(2).expand(rows, 2)
    pages = cache.view(2, PAGE, 1, 132)
    given = (q_fp8[:, None], pages, weights[..., 0], lengths, table, 90)
    scores = sparse.fp8_paged_mqa_logits_torch(*given)
    rounded_q = rounded_index(latents.rotate_end(q, freqs, position))
    expected = torch.einsum("nhd,kd->nhk", rounded_q, rounded_index(k)).relu()
    expected = (expected * weight[..., None] * 0.5).sum(1)
    expected[torch.arange(keys) >= lengths[:, None]] = 0
    torch.testing.assert_close(scores, expected[:, :90], atol=1e-4, rtol=1e-4)
    # The first of equal scores is taken, however wide the table.
    scores = torch.tensor([[0.0, 2.0, 0.0, 2.0, 1.0, 0.0]])
    for width in (0, 50):
        wide = F.pad(scores, (0, width), value=-1.0)
        assert sparse.first_of_ties(wide, 4)[1].tolist() == [[1, 3, 4, 0]]

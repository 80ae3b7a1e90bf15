"""Every replacement against its own plain formula, or transformers' form of it; no server."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from tests.engine.v4 import compressor, exact, latents, plans, sparse, streams
from tests.engine.v4.checkpoint import CONFIG
from tests.engine.v4.golden import rounded_index, rounded_latents

PAGE, STRIDE = 64, 37440  # 64 rows of 584 bytes, padded to a multiple of 576


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def freqs() -> torch.Tensor:
    angles = torch.arange(512)[:, None] / 10000 ** (torch.arange(32) / 32)
    return torch.polar(torch.ones_like(angles), angles)


def latent_pages(count: int) -> torch.Tensor:
    """Pages as SGLang has them: ``[pages, page, 1, 584]``, strided over padded bytes."""
    raw = torch.zeros(count, STRIDE, dtype=torch.uint8)
    return torch.as_strided(raw, (count, PAGE, 1, 584), (STRIDE, 584, 584, 1))


def stored(x: torch.Tensor, loc: torch.Tensor, pages: int = 4) -> torch.Tensor:
    cache = latent_pages(pages)
    whole = torch.as_strided(cache, (pages, STRIDE), (STRIDE, 1))
    latents.store_latents(x, loc, whole, PAGE)
    return cache


def test_latents_come_back_rounded_and_nothing_else_is_written():
    x, loc = torch.randn(100, 512) * 3, torch.randperm(250)[:100]
    loc[7] = -1
    cache = stored(x, loc)
    kept = loc >= 0
    assert torch.equal(latents.load_latents(cache, loc[kept]), rounded_latents(x[kept]))
    empty = torch.tensor(sorted(set(range(256)) - set(loc.tolist())))
    assert not latents.load_latents(cache, empty)[:, :448].any()


def test_rope_and_norms_are_transformers(freqs):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

    x, at = torch.randn(40, 2, 512), torch.randint(512, (40,))
    cos, sin = freqs[at].real, freqs[at].imag
    expected = v4.apply_rotary_pos_emb(x, cos, sin)
    torch.testing.assert_close(latents.rotate_end(x, freqs, at), expected)
    back = latents.rotate(expected[..., 448:], freqs, at, inverse=True)
    torch.testing.assert_close(back, x[..., 448:], atol=1e-5, rtol=1e-5)
    rows = x[:, 0].clone()
    latents.fused_rope_inplace(rows[:, 448:], None, freqs, at)
    torch.testing.assert_close(rows, expected[:, 0])
    norm = v4.DeepseekV4RMSNorm(512, eps=1e-6)
    norm.weight.data.normal_()
    torch.testing.assert_close(latents.rms(x, 1e-6, norm.weight), norm(x))
    q = torch.empty_like(x)
    latents.fused_q_norm_rope(x, q, 1e-6, freqs, at)
    plain = v4.DeepseekV4UnweightedRMSNorm(eps=1e-6)
    torch.testing.assert_close(q, v4.apply_rotary_pos_emb(plain(x), cos, sin))
    cache = latent_pages(1)
    whole = torch.as_strided(cache, (1, STRIDE), (STRIDE, 1))
    at, loc = at[:40], torch.arange(40, dtype=torch.int32)
    latents.fused_k_norm_rope_flashmla(x[:, 0], norm.weight, 1e-6, freqs, at, loc, whole, PAGE)
    expected = rounded_latents(latents.rotate_end(norm(x[:, 0]), freqs, at).detach())
    torch.testing.assert_close(latents.load_latents(cache, loc.long()), expected)


def test_index_scores_are_weighted_rectified_products(freqs):
    """The Hadamard transform of both sides changes no product; fp8 does, by its rounding alone."""
    rows, heads, keys = 5, 4, 100
    q, weight = torch.randn(rows, heads, 128), torch.randn(rows, heads)
    k, at = torch.randn(keys, 128), torch.randint(512, (rows,))
    q_fp8, weights = latents.fused_q_indexer_rope_hadamard_quant(q, weight, 0.5, freqs, at)
    cache = torch.zeros(2, PAGE * 132, dtype=torch.uint8)
    latents.store_index(k, torch.arange(keys), cache, PAGE)
    lengths = torch.tensor([100, 1, 64, 65, 99])
    table = torch.arange(2).expand(rows, 2)
    found = sparse.index_logits(
        q_fp8[:, None], cache.view(2, PAGE, 1, 132), weights[..., 0], lengths, table, None, 90, True
    )
    rounded_q = rounded_index(latents.rotate_end(q, freqs, at))
    scores = torch.einsum("nhd,kd->nhk", rounded_q, rounded_index(k)).relu()
    expected = (scores * weight[..., None] * 0.5).sum(1)
    expected[torch.arange(keys) >= lengths[:, None]] = 0
    torch.testing.assert_close(found, expected[:, :90], atol=1e-4, rtol=1e-4)


def test_sparse_attention_is_softmax_over_the_named_keys_and_a_sink():
    x, more = torch.randn(128, 512), torch.randn(64, 512)
    keys, extra = stored(x, torch.arange(128)), stored(more, torch.arange(64))
    q, sink = torch.randn(3, 1, 2, 512), torch.randn(2)
    indices = torch.stack([torch.randperm(128)[:20] for _ in range(3)]).int()[:, None]
    indices[0, 0, 3] = -1
    others = torch.stack([torch.randperm(64)[:10] for _ in range(3)]).int()[:, None]
    lengths, other_lengths = torch.tensor([20, 7, 1]), torch.tensor([0, 10, 3])
    found, _ = sparse.flash_mla_with_kvcache(
        q, keys, None, None, 512, None, softmax_scale=0.1, indices=indices, attn_sink=sink,
        topk_length=lengths, extra_k_cache=extra, extra_indices_in_kvcache=others,
        extra_topk_length=other_lengths,
    )  # fmt: skip
    for i in range(3):
        own = [j for j in indices[i, 0, : lengths[i]].tolist() if j >= 0]
        rest = others[i, 0, : other_lengths[i]].tolist()
        kv = torch.cat([rounded_latents(x)[own], rounded_latents(more)[rest]])
        weights = (q[i, 0] @ kv.T * 0.1).exp()
        expected = weights @ kv / (weights.sum(-1, keepdim=True) + sink.exp()[:, None])
        torch.testing.assert_close(found[i, 0], expected, atol=1e-4, rtol=1e-4)


def test_the_first_of_equal_scores_is_taken_whatever_the_width():
    scores = torch.tensor([[0.0, 2.0, 0.0, 2.0, 1.0, 0.0]])
    for width in (0, 50):
        wide = F.pad(scores, (0, width), value=-1.0)
        assert sparse.first_of_ties(wide, 4)[1].tolist() == [[1, 3, 4, 0]]


def test_compression_metadata_by_counting():
    lengths = torch.tensor([3, 4, 127, 128, 256, 300])
    loc, table = lengths + 1000, torch.arange(12).view(6, 2)
    out = sparse.init_compression_metadata(lengths, lengths - 1, loc, table, 256)
    for i, length in enumerate(lengths.tolist()):
        for ratio, found in ((4, out[:4]), (128, out[4:8])):
            complete = sum((t + 1) % ratio == 0 for t in range(length))
            opened = max(t for t in range(length) if t % ratio == 0)
            ends = (length - 1 + 1) % ratio == 0
            expected = [(1000 + length) // ratio if ends else 0, opened, complete]
            assert [int(x[i]) for x in found] == [*expected, max(complete, 1)]
        rows = [2 * int(table[i, r // 2]) + r % 2 for r in range(length // 128)]
        assert out[8][i].tolist() == rows + [-1] * (4 - len(rows))


class Tokens:
    """A request's compressor inputs, and what every complete window must give."""

    def __init__(self, ratio: int, count: int, d: int = 4) -> None:
        self.ratio, self.d = ratio, d
        series = 2 if ratio == 4 else 1
        self.rows = torch.randn(count, 2 * series * d)
        self.ape = torch.randn(series * ratio, d)

    def expected(self, end: int) -> torch.Tensor:
        """The compressed row of the window that ends with token ``end``."""
        r, d = self.ratio, self.d
        window = self.rows[end + 1 - r : end + 1]
        if r == 128:
            return ((window[:, d:] + self.ape).softmax(0) * window[:, :d]).sum(0)
        kv, score = window[:, d : 2 * d], window[:, 3 * d :] + self.ape[4:]
        if end >= 4:
            before = self.rows[end + 1 - 2 * r : end + 1 - r]
            kv = torch.cat([before[:, :d], kv])
            score = torch.cat([before[:, 2 * d : 3 * d] + self.ape[:4], score])
        return (score.softmax(0) * kv).sum(0)


class Ring:
    """One request's ring behind SGLang's plan classes."""

    def __init__(self, tokens: Tokens, size: int) -> None:
        self.tokens, self.size, r = tokens, size, tokens.ratio
        self.pages = torch.full((8 * size // r, r, tokens.rows.shape[1]), float("nan"))
        self.table = torch.arange(2048).expand(2, 2048)
        self.where = (self.table, torch.arange(2048), 256, size)

    def step(self, first: int, rows: torch.Tensor, decode: bool = False) -> torch.Tensor:
        """Compressed rows of a step whose first token has position ``first``, by row."""
        request, end = torch.tensor([1]), torch.tensor([first + len(rows)])
        r = self.tokens.ratio
        if decode:
            plan = plans.plan_decode(r, request, *self.where[:2], end, *self.where[2:])
        else:
            lengths = torch.tensor([len(rows)])
            table, full, page, size = self.where
            plan = plans.plan_prefill(r, request, end, lengths, table, full, page, size, len(rows))
        options = {"head_dim": self.tokens.d, "compress_ratio": r}
        return compressor.compress_forward(self.pages, rows, self.tokens.ape, plan, **options)


@pytest.mark.parametrize("ratio, size", [(4, 16), (128, 256)])
def test_compression_over_chunks_rounds_that_are_cut_short_and_single_steps(ratio, size):
    """Against the whole text's formula; a ring starts as NaN, so nothing else may be read."""
    tokens = Tokens(ratio, 700)
    ring, at, found = Ring(tokens, size), 0, {}
    draw = torch.Generator().manual_seed(1)

    def random(low: int, high: int) -> int:
        return int(torch.randint(low, high, (), generator=draw))

    while at < 690:
        kind = random(0, 3) if at else 0
        # A chunk of a prefill, a verified block, a decode step.
        count = (min(random(1, 300), 690 - at), 7, 1)[kind]
        rows = tokens.rows[at : at + count].clone()
        kept = random(1, 8) if kind == 1 else count
        rows[kept:] = torch.randn_like(rows[kept:])  # rejected drafts
        ends = [t for t in range(at, at + count) if (t + 1) % ratio == 0]
        out = ring.step(at, rows, decode=kind == 2)
        # A prefill's output has one row a window, a decode step's one row a token.
        made = out if kind != 2 else out[: len(ends)]
        for row, end in zip(made, ends, strict=True):
            if end < at + kept:
                found[end] = row
        at += kept
    assert len(found) == 690 // ratio
    for end, row in found.items():
        torch.testing.assert_close(row, tokens.expected(end), atol=1e-5, rtol=1e-5)


@pytest.fixture(scope="module")
def config():
    from transformers import DeepseekV4Config

    return DeepseekV4Config(**CONFIG)


def random_weights(module: torch.nn.Module) -> torch.nn.Module:
    with torch.no_grad():
        for value in module.parameters():
            value.normal_(std=0.3)
    return module


def test_streams_are_mixed_as_transformers_does(config):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

    theirs = random_weights(v4.DeepseekV4HyperConnection(config))
    x, y = torch.randn(6, 4, 128), torch.randn(6, 128)
    post, comb, collapsed = theirs(x[None])
    expected = post[0, ..., None] * y[:, None] + comb[0].transpose(-1, -2) @ x
    eps = (config.rms_norm_eps, config.hc_eps, config.hc_eps)
    given = (x, theirs.fn, theirs.scale, theirs.base, *eps, 2.0, config.hc_sinkhorn_iters)
    ours = streams.mhc_pre(*given)
    torch.testing.assert_close(ours[2], collapsed[0], atol=1e-5, rtol=1e-5)
    mixed = streams.mhc_post(y, x, *ours[:2])
    torch.testing.assert_close(mixed, expected, atol=1e-5, rtol=1e-5)
    fused = streams.mhc_fused_post_pre(y, x, *ours[:2], *given[1:], norm_weight=None)
    torch.testing.assert_close(fused[0], expected, atol=1e-5, rtol=1e-5)
    again = theirs(expected[None])
    torch.testing.assert_close(fused[3], again[2][0], atol=1e-5, rtol=1e-5)
    head = random_weights(v4.DeepseekV4HyperHead(config))
    parts = (head.hc_fn, head.hc_scale, head.hc_base)
    found = streams.fused_hc_head(x, *parts, norm_eps=config.rms_norm_eps, hc_eps=config.hc_eps)
    torch.testing.assert_close(found, head(x[None])[0], atol=1e-5, rtol=1e-5)


def test_experts_are_transformers_without_the_factor(config):
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as v4

    theirs = random_weights(v4.DeepseekV4Experts(config))
    x, ids = torch.randn(9, 128), torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    weights = torch.rand(9, 2)
    method = SimpleNamespace(moe_runner_config=SimpleNamespace(swiglu_limit=config.swiglu_limit))
    layer = SimpleNamespace(w13_weight=theirs.gate_up_proj, w2_weight=theirs.down_proj)
    topk = SimpleNamespace(topk_weights=weights, topk_ids=ids)
    given = SimpleNamespace(hidden_states=x, topk_output=topk)
    found = streams.experts_forward(method, layer, given).hidden_states
    torch.testing.assert_close(found, theirs(x, ids, weights), atol=1e-4, rtol=1e-4)
    gate_up, out = torch.randn(5, 12) * 3, torch.empty(5, 6)
    streams.silu_and_mul_clamp(gate_up, out, 2.0)
    gate, up = gate_up[:, :6].clamp(max=2), gate_up[:, 6:].clamp(-2, 2)
    torch.testing.assert_close(out, gate / (1 + (-gate).exp()) * up)


def test_exact_products_do_not_depend_on_the_number_of_rows():
    x, w = torch.randn(64, 512).bfloat16(), torch.randn(96, 512).bfloat16()
    whole = exact._exact_linear(x, w)
    rows = torch.cat([exact._exact_linear(row[None], w) for row in x])
    assert torch.equal(whole, rows)
    torch.testing.assert_close(whole.float(), x.float() @ w.float().T, atol=0.5, rtol=0.01)
    exp = exact._exact_reduction(torch.exp)
    assert torch.equal(exp(x), torch.cat([exp(row[None]) for row in x]))

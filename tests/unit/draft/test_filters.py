"""Filters without a sort keep exactly what a sorted vocabulary would keep."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_hyperdflash.draft import filters
from sglang_hyperdflash.draft.filters import Sampling, filter_candidates, filter_mask
from sglang_hyperdflash.draft.propose import Draws
from sglang_hyperdflash.serving.verification import exact
from sglang_hyperdflash.serving.verification.exact import read_rows
from sglang_hyperdflash.serving.verification.verifier import Verifier
from tests.target_probabilities import target_probabilities

ROWS = 64


def weights_of(logits: torch.Tensor, sampling: Sampling, renorm=None) -> torch.Tensor:
    """``exact.weights_of`` of ``[N, V]``: requests of one row."""
    return exact.weights_of(logits.unsqueeze(1), sampling, renorm).squeeze(1)


def random_sampling(generator, vocabulary: int, after_top_k: bool = False) -> Sampling:
    """Every mixture of filters, each row its own."""

    def some(low, high, off):
        values = torch.rand(ROWS, generator=generator) * (high - low) + low
        return torch.where(torch.rand(ROWS, generator=generator) < 0.4, off, values)

    return Sampling(
        some(0.3, 2.0, 1.0),
        some(1.0, vocabulary, float(1 << 30)).long(),
        some(0.05, 0.999, 1.0),
        some(0.0, 0.3, 0.0),
        True,
        True,
        True,
        after_top_k,
    )


def oracle(logits: torch.Tensor, s: Sampling) -> torch.Tensor:
    joint, sequential = (
        target_probabilities(
            logits,
            s.temperatures,
            s.top_ks,
            # Rounding may push a tail's share past one: off is off here.
            s.top_ps.masked_fill(s.top_ps >= 1, 2.0),
            s.min_ps,
            top_p_after_top_k=after,
        )
        for after in (False, True)
    )
    rows = (s.min_ps > 0) & s.top_p_after_top_k
    return torch.where(rows.unsqueeze(1), sequential, joint)


@pytest.mark.parametrize("after_top_k", [False, True])
@pytest.mark.parametrize("vocabulary, spread", [(12, 2.0), (3000, 2.0), (3000, 0.1)])
def test_weights_are_those_of_the_sorting_oracle(vocabulary, spread, after_top_k):
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(ROWS, vocabulary, generator=generator) * spread
    sampling = random_sampling(generator, vocabulary, after_top_k)
    weights = weights_of(logits, sampling)
    expected = oracle(logits, sampling)
    found = weights / weights.sum(-1, keepdim=True)
    # A share may fall within one rounding of top-p: then one token more or less is kept.
    different = (found > 0) != (expected > 0)
    assert int(different.sum()) <= 1
    clean = ~different.any(-1)
    torch.testing.assert_close(found[clean], expected[clean], atol=1e-6, rtol=1e-4)


def test_ties_at_the_threshold_keep_the_lowest_ids():
    probs = torch.tensor([[0.1, 0.2, 0.2, 0.1, 0.2, 0.2]])
    sampling = Sampling(*(torch.tensor([v]) for v in (1.0, 3, 1.0, 0.0)), need_top_k=True)
    assert filter_mask(probs, sampling).nonzero()[:, 1].tolist() == [1, 2, 4]


def test_what_a_row_keeps_does_not_depend_on_its_batchmates():
    generator = torch.Generator().manual_seed(5)
    # Coarse logits: many exact ties.
    logits = (torch.randn(ROWS, 900, generator=generator) * 2).round()
    sampling = random_sampling(generator, 900)
    together = weights_of(logits, sampling)
    for i in range(0, ROWS, 7):
        row = Sampling(
            *(
                t[i : i + 1]
                for t in (sampling.temperatures, sampling.top_ks, sampling.top_ps, sampling.min_ps)
            ),
            True,
            True,
            True,
        )
        assert torch.equal(weights_of(logits[i : i + 1], row)[0], together[i])


def test_a_filter_looks_at_the_largest_probabilities_only():
    logits = torch.randn(4, 5000) * 3
    sampling = Sampling(
        torch.ones(4), torch.full((4,), 40), torch.full((4,), 0.9), torch.zeros(4), True, True
    )
    widths = []

    def topk(tensor, width, dim):
        widths.append(width)
        return torch.topk(tensor, width, dim)

    with (
        mock.patch.object(torch.Tensor, "sort", side_effect=AssertionError),
        mock.patch.object(torch.Tensor, "topk", topk),
    ):
        weights_of(logits, sampling)
    assert widths == [filters.FIRST_WIDTH]


def test_every_row_of_a_block_has_its_requests_filters():
    generator = torch.Generator().manual_seed(6)
    logits = torch.randn(ROWS, 3, 50, generator=generator)
    sampling = random_sampling(generator, 50)
    whole = exact.weights_of(logits.clone(), sampling)
    for k in range(3):
        assert torch.equal(whole[:, k], weights_of(logits[:, k], sampling))


def test_a_broken_row_is_found_under_every_filter_and_its_neighbours_are_untouched():
    logits = torch.randn(5, 50)
    whole = logits.clone()
    logits[1, 7], logits[2], logits[3, 0] = float("nan"), float("-inf"), float("inf")
    draws = Draws(torch.arange(5), torch.ones(5).bool())
    at = torch.zeros(5, 1, dtype=torch.int64)
    for flags in ((False,) * 3, (True,) * 3):
        sampling = Sampling(
            torch.ones(5), torch.full((5,), 9), torch.full((5,), 0.9), torch.zeros(5), *flags
        )
        kept = weights_of(logits, sampling)
        found = read_rows(logits, kept, sampling, draws, at, all_draw=False)
        assert (found.tokens == 50).tolist() == [False, True, True, True, False]
        assert found.largest.isnan().tolist() == [False, True, True, True, False]
        assert torch.equal(kept[::4], weights_of(whole, sampling)[::4])
        expected = read_rows(whole, kept, sampling, draws, at, all_draw=False)
        assert torch.equal(found.tokens[::4], expected.tokens[::4])


def test_renorm_kernels_never_see_a_broken_row():
    """They search a threshold in a loop, which a NaN would never end."""
    logits = torch.randn(3, 50)
    logits[1, 7] = float("nan")

    def kernel(probs, limits):
        assert torch.isfinite(probs).all()
        return probs.clone()

    ones = torch.ones(3)
    sampling = Sampling(ones, 9 * ones.int(), 0.9 * ones, 0 * ones, True, True)
    kept = weights_of(logits, sampling, (kernel, kernel))
    assert torch.equal(kept[::2], logits[::2].softmax(-1))


def test_candidates_are_filtered_as_a_vocabulary_of_their_own():
    generator = torch.Generator().manual_seed(2)
    scores = torch.randn(ROWS, 40, generator=generator) * 2
    sampling = random_sampling(generator, 40)
    q = (scores / sampling.temperatures.unsqueeze(-1)).softmax(-1)
    found, expected = filter_candidates(q, sampling), oracle(scores, sampling)
    assert int(((found > 0) != (expected > 0)).sum()) <= 1
    torch.testing.assert_close(found.sum(-1), torch.ones(ROWS))


def test_a_row_without_top_p_keeps_its_tail_beside_one_with_it():
    """FlashInfer stops where its fp32 sum has reached the whole; the tail is smaller than that."""

    def top_p(probs, p):
        ordered, order = probs.sort(-1, descending=True)
        reached = (ordered.cumsum(-1) - ordered).float() < p[:, None] - 1e-7
        return torch.zeros_like(probs).scatter_(1, order, ordered * reached)

    logits = torch.linspace(0, -40, 30).repeat(2, 1)
    ones = torch.ones(2)
    off, on = torch.full((2,), 1 << 30), torch.tensor([1.0, 0.5])
    sampling = Sampling(ones, off, on, 0 * ones, need_top_p=True)
    weights = weights_of(logits, sampling, (None, top_p))
    assert not (top_p(logits.softmax(-1), ones)[0] > 0).all()
    assert torch.equal(weights[0], logits[0].softmax(-1))
    assert 0 < int((weights[1] > 0).sum()) < 10


def test_renorm_kernels_are_called_in_the_order_of_sglangs_samplers():
    """Plain torch in FlashInfer's place: joint, and sequential with min-p, equal the oracle."""

    def top_k(probs, k):
        keep = probs >= probs.sort(-1, descending=True).values.gather(1, k.long()[:, None] - 1)
        return (probs * keep) / (probs * keep).sum(-1, keepdim=True)

    def top_p(probs, p):
        ordered, order = probs.sort(-1, descending=True)
        ordered = ordered * (ordered.cumsum(-1) - ordered <= p[:, None])
        ordered = ordered / ordered.sum(-1, keepdim=True)
        return torch.zeros_like(probs).scatter_(1, order, ordered)

    generator = torch.Generator().manual_seed(8)
    logits = torch.randn(ROWS, 30, generator=generator) * 2
    for after_top_k in (False, True):
        sampling = random_sampling(generator, 30, after_top_k)
        sampling = Sampling(
            sampling.temperatures,
            sampling.top_ks.clamp(max=30),
            sampling.top_ps,
            sampling.min_ps,
            True,
            True,
            True,
            after_top_k,
        )
        weights = weights_of(logits, sampling, (top_k, top_p))
        found, expected = weights / weights.sum(-1, keepdim=True), oracle(logits, sampling)
        assert int(((found > 0) != (expected > 0)).sum()) <= 1


@pytest.mark.parametrize("cuda", [False, True])
def test_a_prefill_s_filters_leave_sglangs_probabilities_alone(cuda):
    """Logprobs are read from them afterwards. A round's own are reused, to save memory."""
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(ROWS, 40, generator=generator)
    sampling = random_sampling(generator, 40, after_top_k=True)
    probs = (logits / sampling.temperatures.unsqueeze(1)).softmax(-1)
    probs[1] = float("nan")
    before = probs.clone()
    verifier = object.__new__(Verifier)
    verifier.renorm = (lambda p, _: p.clone(),) * 2 if cuda else None
    draws = Draws(torch.arange(ROWS), torch.ones(ROWS).bool())
    requests = SimpleNamespace(sampling=sampling, draws=draws)
    _, weights = verifier.draw_prefill(logits, probs, torch.arange(ROWS), requests)
    assert not torch.equal(weights, before)
    assert torch.equal(probs.nan_to_num(nan=-1.0), before.nan_to_num(nan=-1.0))

"""Filters without a sort keep exactly what a sorted vocabulary would keep."""

from types import SimpleNamespace as Namespace

import pytest
import torch

from eval.rivals.eagle_ops import top_k_renorm, top_p_renorm
from sglang_hyperdflash.draft.filters import Sampling, filter_candidates
from sglang_hyperdflash.draft.propose import Draws
from sglang_hyperdflash.serving.verification import exact
from sglang_hyperdflash.serving.verification.exact import read_rows
from sglang_hyperdflash.serving.verification.verifier import Verifier

ROWS = 64


def random_sampling(generator, vocabulary: int, after_top_k: bool = False) -> Sampling:
    """Every mixture of filters, each row its own."""

    def some(low, high, off):
        values = torch.rand(ROWS, generator=generator) * (high - low) + low
        return torch.where(torch.rand(ROWS, generator=generator) < 0.4, off, values)

    temperatures, top_ks = some(0.3, 2.0, 1.0), some(1.0, vocabulary, float(1 << 30)).long()
    top_ps, min_ps = some(0.05, 0.999, 1.0), some(0.0, 0.3, 0.0)
    return Sampling(temperatures, top_ks, top_ps, min_ps, True, True, True, after_top_k)


def oracle(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """SGLang's top-k, top-p and min-p, one token at a time in Python floats."""
    result = torch.zeros(logits.shape)
    columns = (sampling.temperatures, sampling.top_ks, sampling.top_ps, sampling.min_ps)
    limits = zip(*(column.tolist() for column in columns), strict=True)
    for row, (temperature, top_k, top_p, min_p) in enumerate(limits):
        probs = (logits[row].double() / temperature).softmax(0).tolist()
        order = sorted(range(len(probs)), key=lambda i: -probs[i])
        # Joint, top-p is a share of the whole; in a sequential row of what has passed top-k.
        sequential = sampling.top_p_after_top_k and min_p > 0
        share = sum(probs[i] for i in order[:top_k]) if sequential else 1.0
        kept, before = [], 0.0
        for token in order[:top_k]:
            outside = top_p < 1 and before > top_p * share
            if outside or probs[token] < min_p * probs[order[0]]:
                break
            kept.append(token)
            before += probs[token]
        result[row, kept] = torch.tensor([probs[token] for token in kept])
    return result / result.sum(-1, keepdim=True)


def top_k_kernel(probs: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    """In FlashInfer's place; a row of NaN would never end its search of a threshold."""
    assert torch.isfinite(probs).all()
    return top_k_renorm(probs, k)


def top_p_kernel(probs: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """In FlashInfer's place; it stops where its fp32 sum has reached the whole."""
    assert torch.isfinite(probs).all()
    return top_p_renorm(probs, p - 1e-7)


KERNELS = (top_k_kernel, top_p_kernel)


@pytest.mark.parametrize("after_top_k", [False, True])
@pytest.mark.parametrize(
    "vocabulary, spread, decimals, renorm",
    [
        (12, 2.0, 9, None),
        (3000, 2.0, 0, None),  # many exact ties
        (3000, 0.1, 9, None),
        (30, 2.0, 9, KERNELS),
        (30, 12.0, 9, KERNELS),  # rows without top-p keep a tail that FlashInfer's would not
    ],
)
def test_weights_are_those_of_the_sorting_oracle(vocabulary, spread, decimals, renorm, after_top_k):
    """Blocks of two rows with their request's filters; and rows of a drafter's candidates."""
    generator = torch.Generator().manual_seed(vocabulary)
    logits = torch.randn(ROWS, 2, vocabulary, generator=generator).mul(spread)
    logits = logits.round(decimals=decimals)
    sampling = random_sampling(generator, vocabulary, after_top_k)
    weights = exact.weights_of(logits, sampling, renorm)
    for k in range(2):
        expected = oracle(logits[:, k], sampling)
        normed = weights[:, k] / weights[:, k].sum(-1, keepdim=True)
        probs = (logits[:, k] / sampling.temperatures.unsqueeze(1)).softmax(-1)
        for kept in (normed, filter_candidates(probs, sampling)):
            # A share may fall within one rounding of top-p: then one token more or less is kept.
            different = (kept > 0) != (expected > 0)
            assert int(different.sum()) <= 1
            clean = ~different.any(-1)
            torch.testing.assert_close(kept[clean], expected[clean], atol=1e-6, rtol=1e-4)


@pytest.mark.parametrize("needed", [(False,) * 3, (True,) * 3])
@pytest.mark.parametrize("renorm", [None, KERNELS])
def test_a_broken_row_is_seen_and_its_neighbours_are_untouched(needed, renorm):
    logits = torch.randn(5, 50)
    whole = logits.clone()
    logits[1, 7], logits[2], logits[3, 0] = float("nan"), float("-inf"), float("inf")
    ones, positions = torch.ones(5), torch.zeros(5, 1, dtype=torch.int64)
    draws = Draws(torch.arange(5), ones.bool())
    sampling = Sampling(ones, 9 * ones.long(), 0.9 * ones, 0 * ones, *needed)
    kept, expected = (
        exact.weights_of(t.unsqueeze(1), sampling, renorm).squeeze(1) for t in (logits, whole)
    )
    rows = read_rows(logits, kept, sampling, draws, positions, all_draw=False)
    assert (rows.tokens == 50).tolist() == [False, True, True, True, False]
    assert rows.largest.isnan().tolist() == [False, True, True, True, False]
    assert torch.equal(kept[::4], expected[::4])
    expected = read_rows(whole, kept, sampling, draws, positions, all_draw=False)
    assert torch.equal(rows.tokens[::4], expected.tokens[::4])


@pytest.mark.parametrize("renorm", [None, KERNELS])
def test_a_prefills_filters_leave_sglangs_probabilities_alone(renorm):
    """Logprobs are read from them afterwards. A round's own are reused, to save memory."""
    generator = torch.Generator().manual_seed(9)
    logits = torch.randn(ROWS, 40, generator=generator)
    sampling = random_sampling(generator, 40, after_top_k=True)
    probs = (logits / sampling.temperatures.unsqueeze(1)).softmax(-1)
    probs[1] = float("nan")
    before = probs.clone()
    draws = Draws(torch.arange(ROWS), torch.ones(ROWS).bool())
    requests, verifier = Namespace(sampling=sampling, draws=draws), Namespace(renorm=renorm)
    _, weights = Verifier.draw_prefill(verifier, logits, probs, torch.arange(ROWS), requests)
    assert not torch.equal(weights, before)
    assert torch.equal(probs.nan_to_num(nan=-1.0), before.nan_to_num(nan=-1.0))

"""What makes a candidate better than the served drafter."""

from __future__ import annotations

import pytest
import torch

from sglang_hyperdflash.training.judge import LEAST, Comparison, is_better


def histograms(requests: int, tau: float, seed: int = 0) -> torch.Tensor:
    """``[requests, 8]``: ten rounds each, of a tau around the given one."""
    g = torch.Generator().manual_seed(seed)
    p = torch.distributions.Binomial(7, torch.tensor((tau - 1) / 7)).log_prob(torch.arange(8.0))
    drawn = torch.multinomial(p.exp(), requests * 10, replacement=True, generator=g)
    return torch.nn.functional.one_hot(drawn.view(requests, 10), 8).sum(1)


def test_tau_is_of_all_rounds_and_the_interval_holds_the_difference():
    candidate, served = torch.tensor([[0, 4], [2, 0]]), torch.tensor([[8, 0], [1, 1]])
    found = Comparison.of(candidate, served)
    assert found.requests == 2
    assert found.tau == pytest.approx((4 * 2 + 2) / 6) and found.served == pytest.approx(11 / 10)
    big = Comparison.of(histograms(200, 3.0), histograms(200, 2.5, 1))
    assert big.low < big.tau - big.served < big.high and big.high - big.low < 0.5


def test_the_interval_has_the_level_that_it_claims():
    """Of equal drafters, one judging of 200 is called better."""
    wrong = sum(
        Comparison.of(histograms(60, 2.0, 2 * i), histograms(60, 2.0, 2 * i + 1)).low > 0
        for i in range(300)
    )
    assert wrong <= 7


def test_requests_without_a_whole_block_do_not_count():
    none = torch.zeros(3, 8, dtype=torch.int64)
    assert Comparison.of(none, none) == Comparison(0)
    mixed = Comparison.of(*(torch.cat([none, histograms(20, t)]) for t in (3.0, 2.0)))
    assert mixed.requests == 20


def test_equal_drafters_are_not_better():
    same = histograms(100, 2.0)
    found = Comparison.of(same, same)
    assert found.low == found.high == 0 and not is_better(found, Comparison(0))


@pytest.mark.parametrize(
    ("newest", "older", "better"),
    [
        (Comparison(30, 2.5, 2.0, 0.3, 0.7), Comparison(0), True),
        (Comparison(LEAST - 1, 2.5, 2.0, 0.3, 0.7), Comparison(0), False),
        (Comparison(30, 2.1, 2.0, -0.01, 0.2), Comparison(0), False),
        (Comparison(30, 2.5, 2.0, 0.3, 0.7), Comparison(30, 1.95, 2.0, -0.3, 0.2), True),
        # It forgot the older requests; or there are too few of them to say.
        (Comparison(30, 7.0, 2.0, 4.0, 6.0), Comparison(30, 1.8, 2.0, -0.3, -0.1), False),
        (Comparison(30, 7.0, 2.0, 4.0, 6.0), Comparison(LEAST - 1, 1.8, 2.0, -0.3, -0.1), True),
    ],
)
def test_better_on_new_requests_and_not_worse_on_older_ones(newest, older, better):
    assert is_better(newest, older) is better

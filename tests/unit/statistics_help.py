"""Goodness-of-fit helpers shared by the distribution tests."""

import torch
from scipy import stats

MINIMUM_EXPECTED = 5.0


def chi_square_p_value(draws: torch.Tensor, distribution: torch.Tensor) -> float:
    """p-value of integer ``draws``; cells below five expected draws are pooled.

    A draw that the distribution gives no mass is an outright failure: 0.0.
    """
    counts = torch.bincount(draws.long(), minlength=len(distribution)).double()
    distribution = distribution.double() / distribution.double().sum()
    if bool((counts[distribution == 0] > 0).any()):
        return 0.0
    expected = distribution * counts.sum()
    large = expected >= MINIMUM_EXPECTED
    observed, wanted = counts[large].tolist(), expected[large].tolist()
    if bool((~large).any()) and float(expected[~large].sum()) > 0:
        observed.append(float(counts[~large].sum()))
        wanted.append(float(expected[~large].sum()))
    if len(observed) < 2:
        return 1.0
    scale = sum(observed) / sum(wanted)
    return float(stats.chisquare(observed, [w * scale for w in wanted]).pvalue)

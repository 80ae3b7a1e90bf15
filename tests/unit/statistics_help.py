"""Goodness-of-fit helpers shared by the distribution tests."""

import torch
from scipy import stats


def chi_square_p_value(draws: torch.Tensor, distribution: torch.Tensor) -> float:
    """p-value of integer ``draws``; cells below five expected draws are pooled.

    A draw that the distribution gives no mass is an outright failure: 0.0.
    """
    counts = torch.bincount(draws.long(), minlength=len(distribution)).double()
    expected = distribution.double() / distribution.double().sum() * counts.sum()
    if bool((counts[expected == 0] > 0).any()):
        return 0.0
    small = expected < 5.0
    observed, wanted = (
        torch.cat([cells[~small], cells[small].sum(0, keepdim=True)])
        for cells in (counts, expected)
    )
    observed, wanted = observed[wanted > 0], wanted[wanted > 0]
    return float(stats.chisquare(observed, wanted).pvalue) if len(observed) > 1 else 1.0

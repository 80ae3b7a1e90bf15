"""The checks that a comparison of drafts is worth something refuse what is always the same."""

from __future__ import annotations

import pytest

from tests.engine.drafters import assert_lengths_vary, assert_varied


def test_blocks_that_repeat_are_refused():
    assert_varied([[1, 2], [1, 3], [1, 2]])
    with pytest.raises(AssertionError, match="6 blocks compared, 2 distinct"):
        assert_varied([[1, 2]] * 5 + [[1, 3]])


@pytest.mark.parametrize(
    "histograms, message",
    [
        ([[9, 0, 0, 2], [3]], "only these lengths"),
        ([[4, 2, 1], [4, 2, 1]], "every request has the rounds"),
    ],
)
def test_rounds_that_end_alike_are_refused(histograms, message):
    assert_lengths_vary([[4, 2, 1], [4, 2, 0, 1]])
    with pytest.raises(AssertionError, match=message):
        assert_lengths_vary(histograms)

"""Dealing samples to processes: every sample once, equal counts, little padding and waiting."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.deal import check_batch, deal


@given(
    st.integers(1, 9).flatmap(
        lambda size: st.tuples(
            st.just(size),
            st.integers(1, 12).flatmap(
                lambda each: st.lists(
                    st.integers(1, 5000), min_size=each * size, max_size=each * size
                )
            ),
        )
    ),
    st.integers(1, 6),
)
def test_every_sample_is_dealt_once_and_processes_get_equally_many_parts(drawn, most):
    size, rows = drawn
    shares = deal(rows, size, most)
    parts = [part for share in shares for part in share]
    assert len(shares) == size and len({len(share) for share in shares}) == 1
    assert sorted(i for part in parts for i in part) == list(range(len(rows)))
    assert all(1 <= len(part) <= most for part in parts)


@pytest.mark.parametrize(
    ("size", "batch", "padded", "slowest"),
    [(1, 32, 1.2, 1.2), (8, 32, 1.1, 1.2), (8, 128, 1.1, 1.1), (64, 256, 1.1, 1.4)],
)
def test_padding_is_small_and_no_process_waits_long(size, batch, padded, slowest):
    """Over lengths that spread as those of chats do."""
    g, sums = torch.Generator().manual_seed(0), torch.zeros(3)
    for _ in range(20):
        rows = (1000 * torch.exp(0.5 * torch.randn(batch, generator=g))).long().tolist()
        loads = [
            sum(len(part) * max(rows[i] for i in part) for part in share)
            for share in deal(rows, size, 4)
        ]
        sums += torch.tensor([sum(rows), sum(loads), size * max(loads)])
    assert sums[1] < padded * sums[0] and sums[2] < slowest * sums[0]


def test_a_batch_that_processes_cannot_share_is_refused():
    check_batch(64, 64)
    for batch in (32, 96):
        with pytest.raises(HyperDFlashConfigError, match=r"64 processes.*(64|128)"):
            check_batch(batch, 64)

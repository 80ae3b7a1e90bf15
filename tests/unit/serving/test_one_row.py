"""Rows whose draft K/V wait: what is written, when, and that nothing is lost or overwritten."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from sglang_hyperdflash.serving import one_row
from sglang_hyperdflash.serving.one_row import OneRowWorker
from sglang_hyperdflash.serving.sampled_worker import SampledWorker

BATCH, WIDE = 3, 4


class Recorded(OneRowWorker):
    """The part of a worker that keeps rows, and what it would have written."""

    def __init__(self, ring: int | None = None, mode: str = "null") -> None:
        arguments = SimpleNamespace(disaggregation_mode=mode)
        with mock.patch.object(SampledWorker, "__init__", lambda *inputs: None):
            super().__init__(arguments, 0, 0, None)
        self.requests = object()
        self.window = None if ring is None else SimpleNamespace(ring=ring)
        self.calls = []

    def _append_target_hidden_to_draft_kv_by_loc(self, **rows) -> None:
        self.calls.append({name: value.clone() for name, value in rows.items()})


def keep_rounds(worker: Recorded, rounds: int, shared: bool = False) -> torch.Tensor:
    """Rounds of one batch through one buffer; returns all residuals, in order."""
    buffer, kept = torch.zeros(BATCH, WIDE), []
    for number in range(rounds):
        buffer = buffer if shared else torch.zeros(BATCH, WIDE)
        buffer.fill_(number)
        kept.append(buffer.clone())
        slots = torch.arange(BATCH) * 100 + number
        worker._keep_pending(buffer, slots, torch.full((BATCH,), number), shared)
    return torch.cat(kept)


def test_several_rounds_are_written_in_one_call_in_their_order():
    worker = Recorded()
    hidden = keep_rounds(worker, 4)
    assert worker.calls == [] and worker._pending_of is worker.requests
    worker.write_pending()
    (call,) = worker.calls
    assert torch.equal(call["target_hidden"], hidden)
    assert call["cache_loc"].tolist() == [r * 100 + n for n in range(4) for r in range(BATCH)]
    assert call["positions"].tolist() == [n for n in range(4) for _ in range(BATCH)]
    assert set(call) == {"target_hidden", "cache_loc", "positions"}
    worker.write_pending()
    assert len(worker.calls) == 1 and worker._pending_of is None


def test_a_window_is_told_that_these_are_no_prefill():
    worker = Recorded(ring=7)
    keep_rounds(worker, 2)
    worker.write_pending()
    assert worker.calls[0]["cache_loc_2d"].shape == (2 * BATCH, 1)
    assert worker.calls[0]["commit_lens"].tolist() == [1] * 2 * BATCH


def test_a_graph_s_output_is_kept_before_the_next_pass_overwrites_it():
    worker = Recorded()
    hidden = keep_rounds(worker, 4, shared=True)
    worker.write_pending()
    assert torch.equal(worker.calls[0]["target_hidden"], hidden)


@pytest.mark.parametrize(("ring", "most"), [(None, one_row.PENDING_ROWS), (7, 7)])
def test_no_more_rows_wait_than_fit(ring, most):
    worker = Recorded(ring)
    hidden = keep_rounds(worker, 200)
    worker.write_pending()
    sizes = [len(call["cache_loc"]) for call in worker.calls]
    assert max(sizes) <= most and sum(sizes) == 200 * BATCH
    assert torch.equal(torch.cat([c["target_hidden"] for c in worker.calls]), hidden)


def test_a_large_batch_is_written_at_once(monkeypatch):
    monkeypatch.setattr(one_row, "PENDING_ROWS", BATCH)
    worker = Recorded()
    keep_rounds(worker, 2)
    assert len(worker.calls) == 2 and worker._pending == []


def test_a_decode_node_writes_every_round_so_that_nothing_is_written_over_what_arrives():
    """A request ends, its slots go to another, whose K/V arrive before its first round."""
    pool = torch.zeros(1000, WIDE)
    worker = Recorded(mode="decode")
    hidden = keep_rounds(worker, 4)
    for call in worker.calls:
        pool[call["cache_loc"]] = call["target_hidden"]
    slots = torch.cat([call["cache_loc"] for call in worker.calls])
    assert torch.equal(pool[slots], hidden), "a backup would miss what is still to be written"
    pool[slots] = arrived = torch.full_like(hidden, -1.0)
    written = len(worker.calls)
    worker.requests = object()
    worker.write_pending()
    for call in worker.calls[written:]:
        pool[call["cache_loc"]] = call["target_hidden"]
    assert torch.equal(pool[slots], arrived)

"""Rows whose draft K/V wait: what is written, when, and that nothing is lost or overwritten."""

from __future__ import annotations

from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from sglang.srt.arg_groups.overrides import field_names
from sglang.srt.server_args import ServerArgs

from sglang_hyperdflash.serving import one_row
from sglang_hyperdflash.serving.one_row import OneRowWorker
from sglang_hyperdflash.serving.pending_kv import PENDING_ROWS
from sglang_hyperdflash.serving.sampled_worker import SampledWorker

BATCH, WIDE = 3, 4


class Recorded(OneRowWorker):
    """The part of a worker that keeps rows, and what it would have written."""

    def __init__(self, window: bool = False, mode: str = "null", linked: bool = False) -> None:
        arguments = SimpleNamespace(
            disaggregation_mode=mode, enable_unified_cache_external_linker=linked
        )
        with mock.patch.object(SampledWorker, "__init__", lambda *inputs: None):
            super().__init__(arguments, 0, 0, None)
        self.requests = object()
        self.window = object() if window else None
        self.calls = []
        self.pool = torch.zeros(1000, WIDE)


@pytest.fixture(autouse=True)
def _write(monkeypatch):
    """Stands in for SGLang's write: remembers the call, and puts the residuals into the pool."""

    def write(worker: Recorded, **rows) -> None:
        worker.calls.append({name: value.clone() for name, value in rows.items()})
        for slot, hidden in zip(rows["cache_loc"].tolist(), rows["target_hidden"], strict=True):
            worker.pool[slot] = hidden

    monkeypatch.setattr(SampledWorker, "_append_target_hidden_to_draft_kv_by_loc", write)


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
    worker = Recorded(window=True)
    keep_rounds(worker, 2)
    worker.write_pending()
    assert worker.calls[0]["cache_loc_2d"].shape == (2 * BATCH, 1)
    assert worker.calls[0]["commit_lens"].tolist() == [1] * 2 * BATCH


def test_a_graph_s_output_is_kept_before_the_next_pass_overwrites_it():
    worker = Recorded()
    hidden = keep_rounds(worker, 4, shared=True)
    worker.write_pending()
    assert torch.equal(worker.calls[0]["target_hidden"], hidden)


def test_no_more_rows_wait_than_fit():
    worker = Recorded()
    hidden = keep_rounds(worker, 300)
    worker.write_pending()
    sizes = [len(call["cache_loc"]) for call in worker.calls]
    assert max(sizes) <= PENDING_ROWS and sum(sizes) == 300 * BATCH
    assert len(sizes) == -(-300 * BATCH // (PENDING_ROWS // BATCH * BATCH))
    assert torch.equal(torch.cat([c["target_hidden"] for c in worker.calls]), hidden)


def test_a_large_batch_is_written_at_once(monkeypatch):
    monkeypatch.setattr(one_row, "PENDING_ROWS", BATCH)
    worker = Recorded()
    keep_rounds(worker, 2)
    assert len(worker.calls) == 2 and not len(worker._pending)


@pytest.mark.parametrize(
    "shared", [{"mode": "decode"}, {"mode": "prefill"}, {"linked": True}], ids=str
)
def test_where_others_read_slots_every_pass_is_written_at_once(shared):
    """A request ends, its slots go to another, whose K/V arrive before its first round."""
    worker = Recorded(**shared)
    hidden = keep_rounds(worker, 4)
    slots = torch.cat([call["cache_loc"] for call in worker.calls])
    assert torch.equal(worker.pool[slots], hidden), "a backup would miss what is still to come"
    worker.pool[slots] = arrived = torch.full_like(hidden, -1.0)
    worker.requests, worker._prefill_waits = object(), True
    worker.write_pending()
    assert torch.equal(worker.pool[slots], arrived)
    prefill(worker, [5, 6], 9.0)
    assert worker.pool[[5, 6], 0].tolist() == [9.0, 9.0]
    fields = {"disaggregation_mode", "enable_unified_cache_external_linker"}
    assert fields <= set(field_names(ServerArgs))


def prefill(worker: Recorded, slots: list[int], value: float, pad: int = 0) -> torch.Tensor:
    """SGLang's write behind a prefill; returns the residuals, which the next pass overwrites."""
    hidden = torch.full((len(slots) + pad, WIDE), value)
    worker._append_target_hidden_to_draft_kv_by_loc(
        target_hidden=hidden,
        cache_loc=torch.tensor(slots),
        positions=torch.arange(len(slots)),
        extend_lens=torch.tensor([len(slots)]),
    )
    return hidden


def test_a_prefill_between_rounds_without_drafts_waits_with_their_rows():
    worker = Recorded()
    hidden = keep_rounds(worker, 2)
    worker._prefill_waits = True
    prefill(worker, [7, 8], 9.0, pad=1).zero_()
    worker._prefill_waits = False
    after = keep_rounds(worker, 1)
    assert not worker.calls
    worker.write_pending()
    (call,) = worker.calls
    given = torch.cat([hidden, torch.full((2, WIDE), 9.0), after])
    assert torch.equal(call["target_hidden"], given)
    assert call["positions"].tolist() == [0] * 3 + [1] * 3 + [0, 1] + [0] * 3


def test_a_prefill_that_does_not_wait_is_written_behind_the_rows_that_did():
    """Too long a one, or one in front of a drafted block."""
    worker = Recorded()
    keep_rounds(worker, 1)
    prefill(worker, [0, 100], 9.0)
    assert [len(call["cache_loc"]) for call in worker.calls] == [BATCH, 2]
    assert worker.pool[[0, 100, 200], 0].tolist() == [9.0, 9.0, 0.0]
    worker._prefill_waits = True
    prefill(worker, list(range(PENDING_ROWS + 1)), 3.0)
    assert len(worker.calls) == 3 and not len(worker._pending)

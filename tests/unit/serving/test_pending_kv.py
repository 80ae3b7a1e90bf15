"""Rows whose draft K/V wait: which pass wants them written, and whose a slot is by then."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_hyperdflash.serving.one_row import OneRowWorker
from sglang_hyperdflash.serving.pending_kv import PendingRows, last_owners
from sglang_hyperdflash.serving.width_worker import WidthWorker


@pytest.mark.parametrize("window", [None, object()])
def test_rows_wait_until_a_block_is_drafted(monkeypatch, window):
    """Through prefills and other requests; with a window not beyond the requests they are of."""
    monkeypatch.setattr(OneRowWorker, "run_round", lambda worker, batch: None)
    worker = object.__new__(WidthWorker)
    widths, said = [], []
    worker.width_control = SimpleNamespace(
        next=lambda *classes: widths[-1],
        setting=SimpleNamespace(fixed=True),
    )
    worker.block, worker._rounds_width, worker.window, worker._info = 7, 7, window, None
    worker._pending, worker._pending_of = PendingRows(10), None
    worker._states = SimpleNamespace(activate=lambda width: None)
    worker.one_row_round = lambda batch: None
    worker.write_pending = lambda: said.append("written") or worker._pending.take()
    monkeypatch.setattr(worker, "_needs_one_row", lambda: False)

    def run(requests, width: int | None = None, tokens: int = 5) -> list[str]:
        widths.append(width)
        mode = SimpleNamespace(is_extend=lambda: width is None, is_idle=lambda: False)
        worker.requests = requests
        worker.run_round(
            SimpleNamespace(
                forward_mode=mode,
                is_extend_in_batch=False,
                extend_num_tokens=tokens,
            )
        )
        found = said.copy()
        said.clear()
        return found

    def wait() -> None:
        worker._pending.add(torch.ones(1, 2), torch.ones(1).long(), torch.ones(1))
        worker._pending_of = worker.requests

    first, second = SimpleNamespace(classes=(1, 0)), SimpleNamespace(classes=(2, 0))
    assert run(first) == [] and not worker._prefill_waits  # blocks were drafted before it
    assert run(first, 1) == []
    wait()
    assert run(first, 1) == []
    changed = [] if window is None else ["written"]
    assert run(second) == changed
    assert worker._prefill_waits == (window is None)
    wait()
    assert run(second, 1) == [] and not worker._prefill_waits
    assert run(second, 7) == ["written"]
    assert run(second, 7) == [] and run(first) == [] and not worker._prefill_waits
    # A prompt that is too long to wait: not in the middle of its own pass.
    assert run(second, 1) == []
    wait()
    assert run(second, tokens=10) == ["written"] and not worker._prefill_waits


def test_a_slot_that_changed_hands_while_its_row_waited_is_its_last_owner_s():
    """Written in one call, where the order of rows means nothing on a GPU."""
    pending = PendingRows(10)
    pending.add(torch.full((3, 2), 1.0), torch.tensor([4, 5, 6]), torch.arange(3))
    pending.add(torch.full((2, 2), 2.0), torch.tensor([5, 7]), torch.arange(2))
    pending.add(torch.full((2, 2), 3.0), torch.tensor([7, 4]), torch.arange(2))
    hidden, slots, positions = pending.take()
    live = slots != 0
    assert sorted(slots[live].tolist()) == [4, 5, 6, 7]
    found = {int(s): float(h[0]) for s, h in zip(slots[live], hidden[live], strict=True)}
    assert found == {4: 3.0, 5: 2.0, 6: 1.0, 7: 3.0}
    assert len(hidden) == len(slots) == len(positions) == 7
    assert pending.take() is None and not len(pending)
    assert last_owners(torch.tensor([3, 3, 3, 2])).tolist() == [0, 0, 3, 2]

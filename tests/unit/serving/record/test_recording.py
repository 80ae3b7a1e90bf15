"""What passes leave in a store, without an engine: whole requests, or nothing of them."""

from __future__ import annotations

import resource
import time
from threading import Thread
from types import SimpleNamespace
from unittest.mock import MagicMock

import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.serving.record import writer as writer_module
from sglang_hyperdflash.serving.record.ring import Ring
from sglang_hyperdflash.serving.record.settings import BEHIND
from sglang_hyperdflash.serving.scheduler.weight_updates import target_by_default
from tests.unit.serving.record.engine import (
    BLOCK,
    D,
    Engine,
    M,
    Request,
    assert_whole,
    rows_of,
    serve,
    stored,
)
from tests.unit.serving.scheduler.test_weight_updates import manager
from tests.waiting import PATIENCE, until


def test_chunks_rounds_and_mixed_batches_become_whole_samples(tmp_path):
    """With results that come a pass later, drafts that are rejected, and an end inside a block."""
    engine = Engine(tmp_path / "store").start()
    a, b, c = Request("a", 9, 8), Request("b", 3, 5), Request("c", 4, 6, asked=False)
    engine.prefill((a, 0, 4))
    engine.prefill((a, 4, 9), (b, 0, 3), (c, 0, 4))
    engine.round((a, 1), (b, 3), (c, 2))
    engine.round((a, 2), (b, BLOCK), (c, 1))  # b ends at the first of four
    engine.round((a, 1), (b, BLOCK), (c, 1))  # b runs once more
    engine.process()
    d = Request("d", 2, 1)
    engine.prefill((d, 0, 2), (a, 13, 14))  # a mixed batch
    engine.round((a, BLOCK), (c, 2))
    found = {tuple(each[0]): each for each in engine.close()}
    assert len(found) == 3
    for req in (a, b, d):
        assert req.finished()
        assert_whole(found[tuple(req.tokens)], req)
    assert engine.counts() == {"requests": 3}


def test_a_retracted_request_is_stored_once_and_without_a_gap(tmp_path):
    engine = Engine(tmp_path / "store").start()
    req = Request("a", 6, 9)
    engine.prefill((req, 0, 6))
    engine.round((req, 2))
    engine.round((req, 2))
    engine.process()
    engine.prefill((req, 4, 8))  # its K/V are computed again, the first four from the cache
    engine.prefill((req, 8, 6 + len(req.output_ids)))
    engine.round((req, 3))
    engine.round((req, BLOCK))
    (found,) = engine.close()
    assert_whole(found, req)


def test_what_the_prefix_cache_has_is_left_out(tmp_path):
    engine = Engine(tmp_path / "store", length=40, context=0.5).start()
    half, more = Request("half", 10, 5), Request("more", 10, 5)
    long, longer = Request("long", 100, 5), Request("longer", 100, 5)
    for req, cached in ((half, 5), (more, 6), (long, 90), (longer, 91)):
        serve(engine, req, cached)
    found = engine.close()
    # Of a long prompt, the last 20 tokens are wanted.
    assert len(found) == 2
    assert_whole(found[0], half, start=5)
    assert_whole(found[1], long, start=90)
    assert engine.counts() == {"requests": 2, "cached": 2}


def test_a_long_request_keeps_the_end_of_its_prompt_and_the_start_of_its_answer(tmp_path):
    engine = Engine(tmp_path / "store", length=16).start()
    req = Request("a", 30, 40)
    engine.prefill((req, 0, 15))
    engine.prefill((req, 15, 24))
    engine.prefill((req, 24, 30))
    while not req.finished():
        engine.round((req, 3))
    ((tokens, spans, residual),) = engine.close()
    assert tokens == req.tokens[22:38]
    assert spans == ((8, 16),)
    assert torch.equal(residual, rows_of(req.tokens[22:38], 22))
    assert engine.counts() == {"requests": 1}


def test_a_request_without_a_whole_answer_is_not_stored(tmp_path):
    engine = Engine(tmp_path / "store").start()
    aborted, other = Request("aborted", 5, 30), Request("other", 5, 5)
    engine.prefill((aborted, 0, 5))
    engine.round((aborted, 3))
    engine.process()
    engine.round((aborted, 2))
    aborted.to_finish = FINISH_ABORT()
    engine.process()
    vanished = Request("vanished", 20, 5)  # aborted while it waits for its next chunk
    engine.prefill((vanished, 0, 10))
    engine.process()
    del vanished
    serve(engine, other)
    (found,) = engine.close()
    assert_whole(found, other)
    assert engine.counts() == {"requests": 1, "unfinished": 1}
    assert not list(engine.writer._recordings)  # neither's rows are held


def test_broken_rows_are_never_stored(tmp_path):
    engine = Engine(tmp_path / "store").start()
    req = Request("a", 5, 5)
    rows = rows_of(req.tokens[:5], 0)
    rows[2, 1] = torch.inf
    batch = SimpleNamespace(reqs=[req], prefix_lens=[0], extend_lens=[5])
    output = engine._output(rows)
    engine.recorder.prefilled(batch, output)
    engine._launched(batch, output, [1])
    engine.round((req, BLOCK))
    serve(engine, Request("b", 5, 5))
    assert len(engine.close()) == 1
    assert engine.counts() == {"requests": 1, "broken": 1}


def test_a_writer_that_stands_still_sheds_whole_requests_and_holds_nothing_up(tmp_path):
    engine = Engine(tmp_path / "store", rows=24)  # not started
    first, rest = Request("a", 10, 3), [Request(f"r{i}", 10, 3) for i in range(5)]
    serve(engine, first)  # its 10 + 4 rows fit, and one more's 10 do not
    for req in rest:  # a pass that waited for the writer would never end
        serve(engine, req)
    assert engine.counts()["behind"] == 5
    engine.start()
    engine.wait_for_writer()
    last = Request("last", 10, 3)
    serve(engine, last)
    found = engine.close()
    assert [tokens for tokens, *_ in found] == [first.tokens, last.tokens]
    for each, req in zip(found, (first, last), strict=True):
        assert_whole(each, req)
    assert engine.counts() == {"behind": 5, "requests": 2}


def test_what_is_held_in_memory_has_a_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "HOST_BYTES", 30 * M * D * 4)
    engine = Engine(tmp_path / "store").start()
    small, large = Request("small", 10, 3), Request("large", 40, 3)
    for req in (large, small):
        engine.prefill((req, 0, len(req.origin_input_ids)))
    engine.process()
    engine.wait_for_writer()
    engine.round((small, 1), (large, 1))
    engine.round((small, 1), (large, 1))
    (found,) = engine.close()
    assert_whole(found, small)
    assert engine.counts() == {"requests": 1, "memory": 1}


def test_rows_of_a_request_that_is_shed_meanwhile_are_not_held(tmp_path):
    """The scheduler's thread gives it up while the writer copies its rows."""
    engine, req = Engine(tmp_path / "store"), Request("a", 10, 3)
    engine.prefill((req, 0, 10))
    engine.process()
    done, kept, finished = engine.recorder.queue.get()
    ((recording, _),) = kept

    def copy() -> torch.Tensor:
        shedding = Thread(target=engine.recorder.shed, args=(recording, BEHIND))
        shedding.start()
        shedding.join(1)  # no longer than this if the writer holds a lock now
        return torch.zeros(10, M * D)

    engine.recorder.ring.host = MagicMock(**{"__getitem__.return_value.clone": copy})
    engine.writer.take(done, kept, finished)
    while not recording.shed:
        time.sleep(0.01)
    assert (recording.rows, recording.size) == ([], 0)
    assert engine.counts() == {"behind": 1}


def test_a_full_disk_sheds_and_recording_goes_on_when_there_is_room(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(writer_module, "SHARD_BYTES", 1)
    engine = Engine(tmp_path / "store").start()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    kept = [Request("before", 5, 5), Request("after", 5, 5)]

    def served(req: Request, name: str, count: int) -> None:
        serve(engine, req)
        until(lambda: engine.counts().get(name) == count)

    served(kept[0], "requests", 1)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        for number in (1, 2):
            served(Request(f"lost{number}", 5, 5), "disk", number)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    served(kept[1], "requests", 2)
    found = engine.close()
    assert [tokens for tokens, *_ in found] == [req.tokens for req in kept]
    said = [record.message for record in caplog.records if "not recorded" in record.message]
    assert len(said) == 1 and "HYPERDFLASH_RECORD" in said[0]


def test_an_error_of_the_writer_ends_the_recording_alone(tmp_path, monkeypatch):
    engine = Engine(tmp_path / "store").start()
    monkeypatch.setattr(engine.writer, "take", lambda *_: 1 / 0)
    serve(engine, Request("a", 5, 5))
    engine.writer.join(PATIENCE)
    serve(engine, Request("b", 5, 5))
    assert engine.recorder.stopped
    assert engine.close() == []


def test_new_weights_of_the_target_end_the_recording(tmp_path):
    """A store is of one target; a request that has begun is of two."""
    engine, update = Engine(tmp_path / "store").start(), manager(ALGORITHM)
    update.draft_worker.recorder = engine.recorder
    whole, half, late = (Request(name, 5, 9) for name in ("whole", "half", "late"))

    def select(role: str) -> None:
        original = SchedulerWeightUpdaterManager._select_runners
        target_by_default(getattr(original, "__wrapped__", original), update, role)

    select("draft")
    serve(engine, whole)
    engine.prefill((half, 0, 5))
    engine.process()
    select("target")
    while not half.finished():
        engine.round((half, 3))
        engine.process()
    serve(engine, late)
    (found,) = engine.close()
    assert_whole(found, whole)


def test_servers_of_one_folder_and_a_restarted_one_go_on(tmp_path):
    folder = tmp_path / "store"
    requests = [Request(name, 5, 5) for name in "abcd"]
    one, two = Engine(folder).start(), Engine(folder).start()
    assert (one.store.name, two.store.name) == ("server-0", "server-1")
    serve(one, requests[0])
    serve(two, requests[1])
    one.close()
    again = Engine(folder).start()
    assert (again.store.name, again.store.position) == ("server-0", 1)
    serve(again, requests[2])
    again.close()
    serve(two, requests[3])
    two.close()
    assert sorted(tokens for tokens, *_ in stored(folder)) == sorted(r.tokens for r in requests)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_budget_keeps_the_newest_and_some_older(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "SHARD_BYTES", 1)
    folder = tmp_path / "store"
    sample = 11 * (M * D * 4 + 4) + 512
    engine = Engine(folder, budget=10 * sample).start()
    requests = [Request(f"{i:03}", 6, 5) for i in range(60)]
    for req in requests:
        serve(engine, req)
    engine.wait_for_writer()
    found = [tokens for tokens, *_ in engine.close()]
    assert found and found[-1] == requests[-1].tokens
    size = sum(path.stat().st_size for path in (folder / "shards").iterdir())
    assert size <= 10 * sample
    assert 5 < len(found) < 30


def test_a_ring_gives_every_row_once_and_takes_back_in_any_order():
    ring = Ring(10, 1, torch.float32, torch.device("cpu"))
    a, b, c = ring.take(4), ring.take(4), ring.take(3)
    assert (a.start, a.stop, b.start, b.stop, c) == (0, 4, 4, 8, None)
    b.free = True
    assert ring.take(3) is None  # a, the oldest, is not free
    a.free = True
    assert ring.take(11) is None
    d = ring.take(10)
    assert (d.start, d.stop) == (0, 10)
    d.free = True
    pieces, generator = [], torch.Generator().manual_seed(0)
    taken = 0
    for _ in range(500):
        count = int(torch.randint(1, 6, (), generator=generator))
        piece = ring.take(count)
        if piece is None:
            pieces.pop(int(torch.randint(len(pieces), (), generator=generator))).free = True
            continue
        taken += 1
        rows = [row for each in (*pieces, piece) for row in range(each.start, each.stop)]
        assert len(rows) == len(set(rows)) and max(rows) < 10
        pieces.append(piece)
    assert taken > 100

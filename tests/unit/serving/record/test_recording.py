"""What passes leave in a store, without an engine: whole requests, or nothing of them."""

import random
import resource
from unittest.mock import MagicMock

import pytest
import torch
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_hyperdflash.serving.record import writer as writer_module
from sglang_hyperdflash.serving.record.ring import Ring
from sglang_hyperdflash.serving.record.settings import BEHIND
from tests.unit.serving.record.engine import BLOCK, ROW, Engine, Request, assert_whole, rows_of
from tests.waiting import PATIENCE


@pytest.fixture
def engine(tmp_path) -> Engine:
    return Engine(tmp_path / "store").start()


def test_chunks_rounds_and_mixed_batches_become_whole_samples(engine):
    """With results that come a pass later, drafts that are rejected, and an end inside a block."""
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
    engine.assert_stored(b, d, a)
    assert engine.counts() == {"requests": 3}


def test_a_retracted_request_is_stored_once_and_without_a_gap(engine):
    req = Request("a", 6, 9)
    engine.prefill((req, 0, 6))
    engine.round((req, 2))
    engine.round((req, 2))
    engine.process()
    engine.prefill((req, 4, 8))  # its K/V are computed again, the first four from the cache
    engine.prefill((req, 8, 6 + len(req.output_ids)))
    engine.round((req, 3))
    engine.round((req, BLOCK))
    engine.assert_stored(req)


def test_what_the_prefix_cache_has_and_what_is_too_long_is_left_out(tmp_path):
    """A sample is the end of its prompt and the start of its answer."""
    engine = Engine(tmp_path / "store", length=16).start()
    half, more, long = Request("half", 10, 5), Request("more", 10, 5), Request("long", 30, 40)
    engine.serve(half, cached=6)  # of its last 8 tokens, half are computed
    engine.serve(more, cached=7)
    for begin, end in ((0, 15), (15, 24), (24, 30)):
        engine.prefill((long, begin, end))
    engine.finish(long)
    first, (tokens, spans, residual) = engine.close()
    assert_whole(first, half, start=6)
    assert tokens == long.tokens[22:38] and spans == ((8, 16),)
    assert torch.equal(residual, rows_of(long.tokens[22:38], 22))
    assert engine.counts() == {"requests": 2, "cached": 1}


def test_a_request_without_a_whole_answer_or_with_a_broken_row_is_not_stored(engine):
    aborted, broken, other = (Request(n, 5, a) for n, a in (("a", 30), ("b", 5), ("c", 5)))
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
    engine.prefill((broken, 0, 5), broken=2)
    engine.round((broken, BLOCK))
    engine.serve(other)
    engine.assert_stored(other)
    assert engine.counts() == {"requests": 1, "unfinished": 1, "broken": 1}
    assert not list(engine.writer._recordings), "none of their rows are held"


def test_a_writer_that_stands_still_sheds_whole_requests_and_holds_nothing_up(tmp_path):
    engine = Engine(tmp_path / "store", rows=24)  # not started
    first, rest = Request("a", 10, 3), [Request(f"r{i}", 10, 3) for i in range(5)]
    engine.serve(first)  # its 10 + 4 rows fit, and one more's 10 do not
    for req in rest:  # a pass that waited for the writer would never end
        engine.serve(req)
    assert engine.counts()["behind"] == 5
    engine.start()
    engine.wait_for_writer()
    last = Request("last", 10, 3)
    engine.serve(last)
    engine.assert_stored(first, last)
    assert engine.counts() == {"behind": 5, "requests": 2}


def test_what_is_held_in_memory_has_a_limit(engine, monkeypatch):
    monkeypatch.setattr(writer_module, "HOST_BYTES", 30 * ROW * 4)
    small, large = Request("small", 10, 3), Request("large", 40, 3)
    for req in (large, small):
        engine.prefill((req, 0, len(req.origin_input_ids)))
    engine.process()
    engine.wait_for_writer()
    engine.round((small, 1), (large, 1))
    engine.round((small, 1), (large, 1))
    engine.assert_stored(small)
    assert engine.counts() == {"requests": 1, "memory": 1}


def test_rows_of_a_request_that_is_shed_meanwhile_are_not_held(tmp_path):
    """The scheduler gives it up while the writer copies its rows."""
    engine, req = Engine(tmp_path / "store"), Request("a", 10, 3)
    engine.prefill((req, 0, 10))
    engine.process()
    done, kept, finished = engine.recorder.queue.get()
    ((recording, _),) = kept

    def copy() -> torch.Tensor:
        engine.recorder.shed(recording, BEHIND)
        return torch.zeros(10, ROW)

    engine.recorder.ring.host = MagicMock(**{"__getitem__.return_value.clone": copy})
    engine.writer.take(done, kept, finished)
    assert (recording.rows, recording.size) == ([], 0)
    assert engine.counts() == {"behind": 1}


def test_a_full_disk_sheds_and_recording_goes_on_when_there_is_room(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(writer_module, "SHARD_BYTES", 1)
    engine = Engine(tmp_path / "store").start()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    for rid in ("a", "lost", "lost too", "b"):
        try:
            least = 64 if "lost" in rid else before[0]
            resource.setrlimit(resource.RLIMIT_FSIZE, (least, before[1]))
            engine.serve(Request(rid, 5, 5))
            engine.wait_for_writer()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert len(engine.close()) == 2 and engine.counts() == {"requests": 2, "disk": 2}
    said = [line for line in caplog.messages if "HYPERDFLASH_RECORD" in line]
    assert len(said) == 1


def test_an_error_of_the_writer_ends_the_recording_alone(engine, monkeypatch):
    monkeypatch.setattr(engine.writer, "take", lambda *_: 1 / 0)
    engine.serve(Request("a", 5, 5))
    engine.writer.join(PATIENCE)
    engine.serve(Request("b", 5, 5))
    assert engine.recorder.stopped
    assert engine.close() == []


def test_a_recording_that_ends_keeps_what_was_whole(engine):
    """A store is of one target; with new weights, a request that has begun is of two."""
    whole, half, late = (Request(name, 5, 9) for name in ("whole", "half", "late"))
    engine.serve(whole)
    engine.prefill((half, 0, 5))
    engine.process()
    engine.recorder.stop("new weights")
    engine.finish(half)
    engine.serve(late)
    engine.assert_stored(whole)


def test_servers_of_one_folder_and_a_restarted_one_go_on(tmp_path):
    folder, requests = tmp_path / "store", [Request(name, 5, 5) for name in "abc"]
    one, two = Engine(folder).start(), Engine(folder).start()
    assert (one.store.name, two.store.name) == ("server-0", "server-1")
    one.serve(requests[0])
    two.serve(requests[1])
    one.close()
    again = Engine(folder).start()
    assert (again.store.name, again.store.position) == ("server-0", 1)
    again.serve(requests[2])
    again.close()
    found = sorted(tokens for tokens, *_ in two.close())
    assert found == sorted(req.tokens for req in requests)
    assert folder.stat().st_mode & 0o777 == 0o700


def test_the_budget_keeps_the_newest_and_some_older(tmp_path, monkeypatch):
    monkeypatch.setattr(writer_module, "SHARD_BYTES", 1)
    budget = 6 * (11 * (ROW * 4 + 4) + 512)  # samples
    engine = Engine(tmp_path / "store", budget=budget).start()
    requests = [Request(f"{i:03}", 6, 5) for i in range(30)]
    for req in requests:
        engine.serve(req)
    engine.wait_for_writer()
    found = [tokens for tokens, *_ in engine.close()]
    assert found[-1] == requests[-1].tokens and 3 < len(found) < 15
    shards = (tmp_path / "store" / "shards").iterdir()
    assert sum(path.stat().st_size for path in shards) <= budget


def test_a_ring_gives_every_row_once_and_takes_back_in_any_order():
    ring = Ring(10, 1, torch.float32, torch.device("cpu"))
    draw, pieces, taken = random.Random(0), [], 0
    assert ring.take(11) is None
    for _ in range(300):
        piece = ring.take(draw.randint(1, 5))
        if piece is None:
            pieces.pop(draw.randrange(len(pieces))).free = True
            continue
        taken += 1
        pieces.append(piece)
        rows = [row for each in pieces for row in range(each.start, each.stop)]
        assert len(rows) == len(set(rows)) and max(rows) < 10
    assert taken > 60

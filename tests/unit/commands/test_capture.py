"""``hyperdflash capture`` without an engine: how rows become shards, and what is left out."""

from __future__ import annotations

import asyncio
import gc
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from sglang.srt import runtime_context

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import capture, capture_rows
from sglang_hyperdflash.commands.capture_rows import append_rows, take_rows
from sglang_hyperdflash.commands.pool import Pool, Refused
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, HyperDFlashError, ServerFailed
from sglang_hyperdflash.training.conversations import Loaded
from sglang_hyperdflash.training.samples import Sample
from sglang_hyperdflash.training.store.manifest import read_identity
from sglang_hyperdflash.training.store.reader import StoreReader
from sglang_hyperdflash.training.store.writer import open_writer
from tests.unit.commands.builders import rows_of, write_rows
from tests.unit.training.store import small
from tests.waiting import until

SAMPLES = [Sample(list(range(n)), ((2, n),)) for n in (5, 9, 4, 7)]
ONE = {"instruction": "Count", "output": "1 2 3"}
UNANSWERED = {"messages": [{"role": "user", "content": "Four?"}]}
LISTED = "capture-1-of-1.left_out.jsonl"


def prefill(folder: Path, concurrency: int = 4) -> capture.Prefill:
    places = [f"data.jsonl:{n}" for n in range(1, 100)]
    pool = Pool({"http://nowhere": ""}, attempts=1)
    return capture.Prefill(pool, places, folder, asyncio.Semaphore(concurrency))


def shards(folder: Path, samples, writer, concurrency: int = 4) -> None:
    """Capture every sample as a shard."""
    ranges = [(i, i + 1) for i in range(len(samples))]
    asyncio.run(capture.capture_shards(prefill(folder, concurrency), samples, ranges, writer))


@pytest.fixture
def answered(tmp_path, monkeypatch):
    """A pool that writes rows as the scheduler does; the requests so far."""
    asked: list[str] = []

    async def ask(_pool, *, rid, input_ids, **_options) -> None:
        append_rows(tmp_path, rid, torch.ones(len(input_ids), 4))
        asked.append(rid)

    monkeypatch.setattr(Pool, "ask", ask)
    return asked


@pytest.fixture
def command(tmp_path, target_dir):
    """The command line of a capture of some rows."""

    def line(*rows, out="out") -> list[str]:
        data = write_rows(tmp_path / "data.jsonl", *rows)
        words = ["capture", "--target", target_dir, "--data", data, "--out", tmp_path / out]
        return list(map(str, words))

    return line


def test_too_little_space_ends_it_before_it_starts(tmp_path):
    capture.check_space(tmp_path, 1)
    with pytest.raises(HyperDFlashConfigError, match=str(tmp_path)):
        capture.check_space(tmp_path, 2**60)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_chunks_come_back_in_order_and_once(tmp_path, dtype):
    first, second = torch.randn(3, 6).to(dtype), torch.randn(2, 6).to(dtype)
    append_rows(tmp_path, "request-1", first)
    append_rows(tmp_path, "request-11", first)
    append_rows(tmp_path, "request-1", second)
    assert torch.equal(take_rows(tmp_path, "request-1"), torch.cat([first, second]))
    assert take_rows(tmp_path, "request-1") is None
    assert torch.equal(take_rows(tmp_path, "request-11"), first)


def test_a_full_disk_or_a_refusal_ends_it_with_one_line(tmp_path, monkeypatch):
    """The scheduler goes on without the rows; the command misses them."""
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        append_rows(tmp_path, "hyperdflash-capture-0", torch.ones(2, 6))
    monkeypatch.setattr(Pool, "ask", mock.AsyncMock())
    with pytest.raises(HyperDFlashError, match=r"expected 5 .* found 0; \d+ MiB"):
        asyncio.run(prefill(tmp_path)(0, SAMPLES[0]))
    monkeypatch.setattr(Pool, "ask", mock.AsyncMock(side_effect=Refused("id 9999 is unknown")))
    with pytest.raises(HyperDFlashConfigError, match=r"data.jsonl:2: .*id 9999"):
        asyncio.run(prefill(tmp_path)(1, SAMPLES[1]))


def test_it_keeps_to_the_target_s_context_and_lists_what_it_leaves_out(
    tmp_path, command, capsys, monkeypatch
):
    monkeypatch.setattr(capture, "_capture", lambda *arguments: len(arguments[-1].samples) - 1)
    lines = [{"instruction": "Count", "output": "7 " * n} for n in (9, 3000)]
    assert main(command(*lines, UNANSWERED)) == 0
    said, data = capsys.readouterr().out, tmp_path / "data.jsonl"
    assert "cut to 2041" in said and "3 rows read, 1 kept, 2 left out" in said
    assert f"{data}:2: its first answer ends after 2041 tokens" in said
    assert [e["where"] for e in rows_of(tmp_path / "out" / LISTED)] == [f"{data}:2", f"{data}:3"]
    loaded = Loaded(SAMPLES, ["a:1", "a:2", "a:3", "a:4"], [0, 1, 2, 3])
    capture.check_fits(loaded, 10)
    with pytest.raises(HyperDFlashConfigError, match="a:2 has 9 tokens"):
        capture.check_fits(loaded, 9)


@pytest.mark.parametrize("asked, dtype, size", [("float", "float32", 4), ("auto", "bfloat16", 2)])
def test_it_counts_and_names_the_dtype_that_its_engine_has(
    tmp_path, command, monkeypatch, asked, dtype, size
):
    seen = []
    monkeypatch.setattr(capture, "_with_server", lambda arguments, *_: seen.append(arguments))
    monkeypatch.setattr(capture, "check_space", lambda _, needed: seen.append(needed))
    assert main([*command(ONE), "--dtype", asked]) == 0
    needed, arguments = seen
    assert read_identity(tmp_path / "out").dtype == arguments["dtype"] == dtype
    assert needed % (4 * 256 * size + 4) == 0
    assert main([*command(ONE, out="fp8"), "--dtype", asked, "--states-dtype", "fp8"]) == 0
    assert seen[2] * (4 * 256 * size + 4) == needed * (4 * (256 + 4) + 4)


def test_every_share_is_captured_once_and_all_together(tmp_path, server, monkeypatch):
    """Each over as many connections as there are conversations in flight."""

    def answer(ids):
        rid = next(p["rid"] for p in reversed(server.prompts) if p["input_ids"] == ids)
        sample = next(s for s in small.SAMPLES if s.tokens == ids)
        append_rows(tmp_path, rid, small.residual(len(sample.tokens)))
        return [1]

    server.answer, loaded = answer, Loaded(small.SAMPLES, [""] * 4, [0] * 4)
    monkeypatch.setattr(capture, "own_server", lambda *_, **__: nullcontext(server))
    options = SimpleNamespace(concurrency=1, verbose=False, model="")
    for part in (2, 1):
        with open_writer(tmp_path / "store", small.IDENTITY, f"{part}", small.KIND, {}) as writer:
            writer.begin(small.DATA)
            waiting = writer.missing(small.RANGES[part - 1 :: 2])
            capture._with_server({}, tmp_path, options, loaded, waiting, writer)
    assert len(server.prompts) == 4
    assert server.connections == 2 * 2, "one for /server_info, then one for all of a share"
    source = StoreReader(tmp_path / "store")
    assert small.contents(source) == small.SAMPLES
    for i, sample in enumerate(small.SAMPLES):
        assert torch.equal(source.states([i]).residual[0], small.residual(len(sample.tokens)))


@pytest.mark.parametrize("wrong", [{2}, {1, 2, 3}])
def test_conversations_with_states_that_are_not_finite_are_listed(
    tmp_path, command, monkeypatch, capsys, wrong
):
    """Also by a second run, which captures nothing; the rows on their way are always removed."""
    out, asked, scratches, answer = tmp_path / "out", [], set(), {"instruction": "Count"}

    async def ask(*, rid, input_ids, **_options) -> None:
        (scratch,) = scratches
        place = int(rid.removeprefix(capture_rows.REQUEST_PREFIX)) + 1
        rows = torch.ones(len(input_ids), 4 * 256)
        rows[-1, -1] = torch.nan if place in wrong else 1
        append_rows(scratch, rid, rows)
        asked.append(place)

    def serve(_arguments, scratch, _args, loaded, waiting, writer) -> None:
        scratches.add(scratch)
        # Nobody else may take its name first, or read in it.
        assert scratch.stat().st_mode & 0o777 == 0o700 and not list(scratch.iterdir())
        pool = mock.MagicMock(ask=ask)
        one = capture.Prefill(pool, loaded.places, scratch, asyncio.Semaphore(4))
        asyncio.run(capture.capture_shards(one, loaded.samples, waiting, writer))

    monkeypatch.setattr(capture, "_with_server", serve)
    line = command(*(answer | {"output": "7 " * n} for n in (9, 4, 6)), UNANSWERED)
    unusable = len(wrong) == 3
    for _ in range(2):
        assert main([*line, "--dtype", "float32"]) == (2 if unusable else 0)
        entries, said = rows_of(out / LISTED), capsys.readouterr().out
        assert [e["where"] for e in entries] == [
            f"{tmp_path / 'data.jsonl'}:{n}" for n in (*sorted(wrong), 4)
        ]
        assert f"{len(entries)} left out" in said and f"{3 - len(wrong)} samples in 1 shard" in said
    assert sorted(asked) == [1, 2, 3] and not any(scratch.exists() for scratch in scratches)
    assert unusable or len(StoreReader(out).samples) == 2


def test_the_next_shard_is_prefilled_while_one_is_written(tmp_path, answered):
    begun = []

    class Slow:
        def add(self, start, *_):
            begun.append(start)
            if not start:
                until(lambda: len(answered) > 1, "the second waited for the first")

    shards(tmp_path, SAMPLES, Slow(), 1)
    assert sorted(begun) == [0, 1, 2, 3]


def test_a_shard_that_cannot_be_written_ends_the_capture(tmp_path, answered):
    full = mock.Mock(add=mock.Mock(side_effect=HyperDFlashError("cannot write")))
    with pytest.raises(HyperDFlashError, match="cannot write"):
        shards(tmp_path, SAMPLES * 20, full, 1)
    assert len(answered) < 40


def test_shards_that_fail_together_end_it_without_a_traceback(tmp_path, monkeypatch):
    """A server that dies with four shards in flight: asyncio reports no error that nobody read."""
    heard: list[dict] = []

    async def died(_pool, **_options) -> None:
        raise ServerFailed("gone")

    async def run() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _loop, said: heard.append(said))
        ranges = [(i, i + 1) for i in range(len(SAMPLES))]
        await capture.capture_shards(prefill(tmp_path), SAMPLES, ranges, mock.Mock())

    monkeypatch.setattr(Pool, "ask", died)
    with pytest.raises(ServerFailed, match="gone"):
        asyncio.run(run())
    gc.collect()
    assert heard == []


def test_rows_of_every_attention_group_are_kept(tmp_path, monkeypatch):
    """Under DP attention every group has requests of its own; other ranks write nothing."""
    monkeypatch.setenv("HYPERDFLASH_CAPTURE_FOLDER", str(tmp_path))
    output = SimpleNamespace(hidden_states=torch.arange(12.0).view(6, 2))
    rid, chunk = capture_rows.REQUEST_PREFIX + "0", {"hidden_state_offset": 1}

    def written(**ranks: int) -> torch.Tensor | None:
        parallel = {"tp_rank": 0, "attn_tp_rank": 0, "attn_cp_rank": 0} | ranks
        monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(**parallel))
        request = {"req": SimpleNamespace(rid=rid), "logits_output": output, "extend_input_len": 4}
        assert capture_rows.write_prefill_residual(None, None, **request, **chunk) == 5
        return take_rows(tmp_path, rid)

    expected = torch.arange(2.0, 10.0).view(4, 2)
    assert torch.equal(written(), expected) and torch.equal(written(tp_rank=4), expected)
    assert written(tp_rank=5, attn_tp_rank=1) is None
    assert written(tp_rank=6, attn_cp_rank=1) is None

"""``hyperdflash capture`` without an engine: how rows become shards, and what is left out."""

import asyncio
import gc
import re
import threading
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from sglang.srt import runtime_context

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import capture
from sglang_hyperdflash.commands.pool import Pool
from sglang_hyperdflash.serving import capture_rows
from sglang_hyperdflash.serving.capture_rows import (
    REQUEST_PREFIX,
    RowReader,
    RowWriter,
    write_prefill_residual,
)
from sglang_hyperdflash.targets.loaded import CAPTURE_FOLDER
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.errors import HyperDFlashError, ServerFailed
from sglang_hyperdflash.training.store.manifest import (
    USED,
    Manifest,
    budgeted,
    data_sets,
    read_identity,
)
from sglang_hyperdflash.training.store.reader import StoreReader
from sglang_hyperdflash.training.store.writer import StoreWriter
from tests.unit.commands.builders import rows_of, write_rows
from tests.waiting import until

ONE = {"instruction": "Count", "output": "1 2 3"}
UNANSWERED = {"messages": [{"role": "user", "content": "Four?"}]}
# Each in a shard of its own.
LONG = [{"instruction": "Count", "output": "7 " * n} for n in range(300, 312)]
SHARDED = ["--dtype", "float32", "--shard-mib", "1"]
LISTED = "capture-1-of-1.left_out.jsonl"


def prefill(rid: str, rows: torch.Tensor, chunk: int, before: int = 0, **ranks: int) -> None:
    """What a rank does with a request whose rows come in chunks, after another one's in each."""
    parallel = SimpleNamespace(**{"attn_tp_rank": 0, "attn_cp_rank": 0} | ranks)
    req = SimpleNamespace(rid=rid)
    with mock.patch.object(runtime_context, "get_parallel", lambda: parallel):
        for part in rows.split(chunk):
            buffer = torch.cat([torch.full((before, rows.shape[1]), -1.0), part])
            sizes = {"hidden_state_offset": before, "extend_input_len": len(part)}
            output = SimpleNamespace(hidden_states=buffer)
            end = write_prefill_residual(None, None, req=req, logits_output=output, **sizes)
            assert end == len(buffer)
            buffer.zero_()  # as the next pass may


def taken(folder: Path, *requests: tuple[str, int]) -> list[torch.Tensor]:
    """The rows of requests, which wait for them together."""

    async def take() -> list[torch.Tensor]:
        reader = RowReader(folder)
        return await asyncio.gather(*(reader.take(rid, count) for rid, count in requests))

    return asyncio.run(take())


@pytest.fixture
def slow_disk(monkeypatch):
    """Files are written only while it is set."""
    fast, original = threading.Event(), Path.open

    def open_(path, mode="r", *args, **options):
        if mode == "wb" and "buffering" not in options:
            fast.wait()
        return original(path, mode, *args, **options)

    monkeypatch.setattr(Path, "open", open_)
    yield fast
    fast.set()


@pytest.fixture
def engine(server, monkeypatch):
    """A server in the place of an engine that writes what ``rows`` gives of a prompt."""
    server.scratches, server.rows = set(), lambda ids: torch.ones(len(ids), 4 * 256)
    lock = threading.Lock()

    @contextmanager
    def start(_arguments, *, environment, **_options):
        scratch = Path(environment[CAPTURE_FOLDER])
        # Nobody else may take its name first, or read in it.
        assert scratch.stat().st_mode & 0o777 == 0o700 and not list(scratch.iterdir())
        server.scratches.add(scratch)
        monkeypatch.setenv(CAPTURE_FOLDER, str(scratch))

        def answer(ids):
            rid = next(p["rid"] for p in reversed(server.prompts) if p["input_ids"] == ids)
            with lock:  # a scheduler has one thread
                prefill(rid, server.rows(ids), chunk=64)
            return [1]

        server.answer = answer
        yield server

    monkeypatch.setattr(capture, "start_server", start)
    return server


@pytest.fixture
def command(tmp_path, target_dir):
    """The command line of a capture of some rows."""

    def line(*rows, out="out") -> list[str]:
        data = write_rows(tmp_path / "data.jsonl", *rows)
        words = ["capture", "--target", target_dir, "--data", data, "--out", tmp_path / out]
        return list(map(str, words))

    return line


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_of_chunks_come_back_in_order_and_in_few_files(tmp_path, dtype, slow_disk):
    """A request's rows from the one that it names; a reader waits for those on their way."""
    rows, writer = torch.randn(9, 6).to(dtype), RowWriter(str(tmp_path))
    writer.put("request-1-0", 0, rows[:3])
    writer.put("request-11-0", 0, rows[:5])
    writer.put("request-1-0", 3, rows[3:])
    threading.Timer(0.05, slow_disk.set).start()
    short, whole = taken(tmp_path, ("request-11-0", 5), ("request-1-0", 9))
    assert torch.equal(short, rows[:5]) and torch.equal(whole, rows)
    writer.put("request-2-0", 0, rows)
    until(lambda: list(tmp_path.glob("*.rows")))
    slow_disk.clear()
    for i in range(20):
        writer.put(f"request-{i}-0", 0, rows + i)
    slow_disk.set()
    until(lambda: not list(tmp_path.glob("*.partial")) and len(list(tmp_path.glob("*.rows"))) > 1)
    assert len(list(tmp_path.glob("*.rows"))) <= 3
    asked = [(f"request-{i}-0", 9) for i in range(20) if i != 2]
    for (rid, _), found in zip(asked, taken(tmp_path, *asked), strict=True):
        assert torch.equal(found, rows + int(rid.split("-")[1]))
    assert not list(tmp_path.glob("*.rows"))


def test_the_scheduler_waits_for_a_slow_disk_and_loses_nothing(tmp_path, slow_disk, monkeypatch):
    rows, ended = torch.randn(64, 6), []
    monkeypatch.setattr(capture_rows, "BYTES_UNDER_WAY", rows.nbytes // 4)

    def catch_up() -> None:
        time.sleep(0.1)
        ended.append(slow_disk.set())

    threading.Thread(target=catch_up).start()
    for first in range(0, 64, 8):
        RowWriter(str(tmp_path)).put("request-0", first, rows[first : first + 8])
    assert ended, "it has not waited"
    assert torch.equal(taken(tmp_path, ("request-0", 64))[0], rows)


def test_what_cannot_be_captured_ends_it(tmp_path, command, engine, capsys, monkeypatch):
    """On a full disk the scheduler goes on without the rows; the command misses them."""
    original = Path.open

    def open_(path, mode="r", *args, **options):
        if mode == "wb" and path.parent in engine.scratches and "buffering" not in options:
            raise OSError(28, "No space left on device")
        return original(path, mode, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", open_)
        assert main([*command(ONE, out="full"), *SHARDED]) == 2
    assert re.search(r"found 0; .*No space left.* \d+ MiB", capsys.readouterr().err)
    engine.prompts.clear()
    line, other = ([*command(ONE, out=out), *SHARDED] for out in ("out", "other"))
    assert main(line) == 0
    length = len(engine.prompts.pop()["input_ids"])
    engine.rows, engine.context = lambda ids: torch.ones(len(ids) - 1, 4 * 256), length + 1
    assert main(other) == 2
    missed = rf"expected {length} .* found {length - 1}; \d+ MiB"
    assert re.search(missed, capsys.readouterr().err)
    engine.refuses = {length: 400}
    assert main(other) == 2
    assert re.search("data.jsonl:1: .*no such prompt", capsys.readouterr().err)
    engine.context = length
    assert main(other) == 2
    assert f"data.jsonl:1 has {length} tokens" in capsys.readouterr().err
    monkeypatch.setattr(capture.shutil, "disk_usage", lambda _: SimpleNamespace(free=999))
    assert main(other) == 2 and len(engine.prompts) == 2
    assert str(tmp_path / "other") in capsys.readouterr().err


def test_it_keeps_to_the_context_and_lists_what_is_left_out(tmp_path, command, capsys, monkeypatch):
    monkeypatch.setattr(capture, "_capture", lambda *arguments: len(arguments[-1].samples) - 1)
    lines = [{"instruction": "Count", "output": "7 " * n} for n in (9, 3000)]
    assert main(command(*lines, UNANSWERED)) == 0
    said, data = capsys.readouterr().out, tmp_path / "data.jsonl"
    assert "cut to 2041" in said and "3 rows read, 1 kept, 2 left out" in said
    assert f"{data}:2: its first answer ends after 2041 tokens" in said
    assert [e["where"] for e in rows_of(tmp_path / "out" / LISTED)] == [f"{data}:2", f"{data}:3"]


@pytest.mark.parametrize("asked, dtype, size", [("float", "float32", 4), ("auto", "bfloat16", 2)])
def test_it_counts_and_names_its_engine_s_dtype(tmp_path, command, monkeypatch, asked, dtype, size):
    seen = []
    monkeypatch.setattr(capture, "_with_server", lambda arguments, *_: seen.append(arguments))
    monkeypatch.setattr(capture, "check_space", lambda _, needed: seen.append(needed))
    assert main([*command(ONE), "--dtype", asked]) == 0
    needed, arguments = seen
    assert read_identity(tmp_path / "out").dtype == arguments["dtype"] == dtype
    assert needed % (4 * 256 * size + 4) == 0
    assert main([*command(ONE, out="fp8"), "--dtype", asked, "--states-dtype", "fp8"]) == 0
    assert seen[2] * (4 * 256 * size + 4) == needed * (4 * (256 + 4) + 4)


@pytest.mark.parametrize("wrong", [{2}, {1, 2, 3}])
def test_each_is_captured_once_or_listed_as_not_finite(tmp_path, command, engine, capsys, wrong):
    """Over one connection. A second run captures nothing and lists them, too."""
    out, rows, unusable = tmp_path / "out", {}, len(wrong) == 3

    def states(ids) -> torch.Tensor:
        states = rows[len(ids)] = torch.randn(len(ids), 4 * 256)
        states[-1, -1] = torch.nan if len(rows) in wrong else 1
        return states

    engine.rows = states
    answers = [{"instruction": "Count", "output": "7 " * n} for n in (9, 4, 6)]
    line = [*command(*answers, UNANSWERED), "--dtype", "float32", "--concurrency", "1"]
    for _ in range(2):
        assert main(line) == (2 if unusable else 0)
        entries, said = rows_of(out / LISTED), capsys.readouterr().out
        places = [f"{tmp_path / 'data.jsonl'}:{n}" for n in (*sorted(wrong), 4)]
        assert [e["where"] for e in entries] == places
        assert f"{len(entries)} left out" in said and f"{3 - len(wrong)} samples in 1 shard" in said
    # The first is for /server_info.
    assert (len(engine.prompts), engine.connections) == (3, 2)
    assert not any(scratch.exists() for scratch in engine.scratches)
    if not unusable:
        source = StoreReader(out)
        for i, sample in enumerate(source.samples):
            assert torch.equal(source.states([i]).residual[0], rows[len(sample.tokens)])


def test_the_next_shard_is_prefilled_while_one_is_written(command, engine, monkeypatch):
    add = StoreWriter.add

    def slow(writer, start, *more) -> None:
        if not start:
            until(lambda: len(engine.prompts) > 1, "the second waited for the first")
        add(writer, start, *more)

    monkeypatch.setattr(StoreWriter, "add", slow)
    assert main([*command(*LONG), *SHARDED, "--concurrency", "1"]) == 0


def test_failures_end_it_early_without_a_traceback(command, engine, monkeypatch, capsys, caplog):
    """Shards that cannot be written; a server that dies with four of them in flight."""
    line, full = [*command(*LONG), *SHARDED], HyperDFlashError("cannot write")
    monkeypatch.setattr(StoreWriter, "add", mock.Mock(side_effect=full))
    assert main([*line, "--concurrency", "1"]) == 2 and len(engine.prompts) < len(LONG)
    assert "cannot write" in capsys.readouterr().err
    monkeypatch.setattr(Pool, "ask", mock.AsyncMock(side_effect=ServerFailed("gone")))
    assert main(line) == 2 and "gone" in capsys.readouterr().err
    gc.collect()
    assert "asyncio" not in {record.name for record in caplog.records}, "an error nobody read"


def test_rows_of_every_attention_group_are_kept(tmp_path, monkeypatch):
    """Under DP attention every group has requests of its own; other ranks write nothing."""
    monkeypatch.setenv(CAPTURE_FOLDER, str(tmp_path))
    rows = torch.arange(10.0).view(5, 2)
    prefill(f"{REQUEST_PREFIX}0-0", rows, chunk=2, before=1, tp_rank=0)
    prefill(f"{REQUEST_PREFIX}1-3", rows, chunk=2, before=3, tp_rank=4)
    prefill(f"{REQUEST_PREFIX}2-0", rows, chunk=2, tp_rank=5, attn_tp_rank=1)
    prefill(f"{REQUEST_PREFIX}3-0", rows, chunk=2, tp_rank=6, attn_cp_rank=1)
    first, end = taken(tmp_path, (f"{REQUEST_PREFIX}0-0", 5), (f"{REQUEST_PREFIX}1-3", 2))
    assert torch.equal(first, rows) and torch.equal(end, rows[3:])
    for number in (2, 3):
        with pytest.raises(HyperDFlashError, match="found 0"):
            taken(tmp_path, (f"{REQUEST_PREFIX}{number}-0", 5))


def test_a_window_stores_the_end_of_what_is_stored_without_it(tmp_path, command, engine, capsys):
    """The prefill is of the whole; a run with another window does not continue it."""

    def states(ids) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sum(ids))
        return torch.randn(len(ids), 4 * 256, generator=generator)

    engine.rows, window = states, 7
    question = {"role": "user", "content": "Count to a hundred, one after another. " * 9}
    answer = {"role": "assistant", "content": "1 2 3"}
    chats = [{"messages": [question, answer] * n} for n in (1, 2)]
    for out, more in (("whole", []), ("cut", ["--window", window])):
        assert main([*command(*chats, ONE, out=out), *SHARDED, *map(str, more)]) == 0
    asked = [prompt["input_ids"] for prompt in engine.prompts]
    assert sorted(asked[:3]) == sorted(asked[3:])
    whole, cut = StoreReader(tmp_path / "whole"), StoreReader(tmp_path / "cut")
    firsts = [max(sample.spans[0][0] - window, 0) for sample in whole.samples]
    assert max(firsts) > 64 and len(cut.samples) == 3
    for i, first in enumerate(firsts):
        assert torch.equal(cut.samples[i].tokens, whole.samples[i].tokens[first:])
        spans = [(start - first, end - first) for start, end in whole.samples[i].spans]
        assert cut.samples[i].spans == tuple(spans)
        rows = whole.states([i]).residual[0, first:]
        assert torch.equal(cut.states([i]).residual[0], rows)
    assert main([*command(*chats, ONE, out="cut"), *SHARDED, "--window", "8"]) == 2
    assert "window" in capsys.readouterr().err


def test_a_store_begins_without_an_engine(command, engine, monkeypatch, refused):
    """A training looks for it at its start; the capture comes later."""
    line = [*command(*LONG), *SHARDED, "--budget", "0.05"]
    with monkeypatch.context() as patch:
        patch.setattr(capture, "start_server", None)
        assert main([*line, "--begin"]) == 0
    store = Path(line[line.index("--out") + 1])
    assert budgeted(store).samples == len(LONG) and not list((store / "shards").glob("*"))
    assert "budget was" in refused(*line[:-1], "0.06")
    assert main(line) == 0
    assert len(list((store / "shards").iterdir())) == len(LONG)


def test_a_budget_that_holds_no_four_shards_is_refused(command, refused):
    assert "--budget" in refused(*command(*LONG), *SHARDED, "--budget", "0.001")


def test_a_capture_waits_until_a_training_has_used_what_is_there(command, engine, tmp_path):
    """In the order of the data, and with what it has given up removed."""
    line = [*command(*LONG), *SHARDED, "--concurrency", "4", "--budget", "0.011"]
    store, most = tmp_path / "out", []
    running = threading.Thread(target=lambda: most.append(main(line)), daemon=True)
    running.start()
    held = lambda: sorted((store / "shards").glob("*.safetensors"))  # noqa: E731
    digest = None
    while running.is_alive():
        sizes = []
        for path in held():
            with suppress(FileNotFoundError):
                sizes.append(path.stat().st_size)
        assert sum(sizes) <= 0.0111 * 2**30  # and headers
        if digest is None and (store / "manifests").is_dir() and data_sets(store):
            (data,) = data_sets(store).values()
            digest = data.digest
        shards = Manifest.read(store / "manifests" / "capture-1-of-1.jsonl") if digest else None
        if shards and shards.shards:  # all but the last one are used
            write_json(store / USED, {digest: max(shards.shards)})
        running.join(0.05)
    assert most == [0] and len(held()) < len(LONG)
    every = Manifest.read(store / "manifests" / "capture-1-of-1.jsonl")
    starts = [shard.start for shard in (*every.used, *every.shards.values())]
    assert sorted(starts) == list(range(len(LONG)))

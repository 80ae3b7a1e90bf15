"""``hyperdflash capture`` without an engine: how rows become shards, and what is left out."""

import gc
import re
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from sglang.srt import runtime_context

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import capture, capture_rows
from sglang_hyperdflash.commands.capture_rows import append_rows, take_rows
from sglang_hyperdflash.commands.pool import Pool
from sglang_hyperdflash.targets.loaded import CAPTURE_FOLDER
from sglang_hyperdflash.tools.errors import HyperDFlashError, ServerFailed
from sglang_hyperdflash.training.store.manifest import read_identity
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


@pytest.fixture
def engine(server, monkeypatch):
    """A server in the place of an engine that writes what ``rows`` gives of a prompt."""
    server.scratches, server.rows = set(), lambda ids: torch.ones(len(ids), 4 * 256)

    @contextmanager
    def start(_arguments, *, environment, **_options):
        scratch = Path(environment[CAPTURE_FOLDER])
        # Nobody else may take its name first, or read in it.
        assert scratch.stat().st_mode & 0o777 == 0o700 and not list(scratch.iterdir())
        server.scratches.add(scratch)

        def answer(ids):
            rid = next(p["rid"] for p in reversed(server.prompts) if p["input_ids"] == ids)
            append_rows(scratch, rid, server.rows(ids))
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
def test_rows_of_chunks_come_back_in_order_and_once(tmp_path, dtype):
    first, second = torch.randn(3, 6).to(dtype), torch.randn(2, 6).to(dtype)
    append_rows(tmp_path, "request-1", first)
    append_rows(tmp_path, "request-11", first)
    append_rows(tmp_path, "request-1", second)
    assert torch.equal(take_rows(tmp_path, "request-1"), torch.cat([first, second]))
    assert take_rows(tmp_path, "request-1") is None
    assert torch.equal(take_rows(tmp_path, "request-11"), first)


def test_what_cannot_be_captured_ends_it(tmp_path, command, engine, capsys, monkeypatch):
    """On a full disk the scheduler goes on without the rows; the command misses them."""
    with mock.patch.object(Path, "open", side_effect=OSError(28, "No space left on device")):
        append_rows(tmp_path, "hyperdflash-capture-0", torch.ones(2, 6))
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

"""``hyperdflash capture`` without an engine: what it refuses, and how rows become shards."""

from __future__ import annotations

import asyncio
import gc
import json
import threading
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
from sglang_hyperdflash.training.store.manifest import Data
from sglang_hyperdflash.training.store.reader import StoreReader
from sglang_hyperdflash.training.store.writer import open_writer
from tests.unit.commands.native_server import Answers
from tests.unit.training.store import small
from tests.waiting import PATIENCE

FP8 = ("--states-dtype", "fp8")
SAMPLES = [Sample(list(range(n)), ((2, n),)) for n in (5, 9, 4, 7)]


def prefill(folder: Path, concurrency: int = 4) -> capture.Prefill:
    places = [f"data.jsonl:{n}" for n in range(1, 100)]
    pool = Pool({"http://nowhere": ""}, attempts=1)
    return capture.Prefill(pool, places, folder, asyncio.Semaphore(concurrency))


def test_too_little_space_is_said_before_it_starts(tmp_path, capsys):
    capture.check_space(tmp_path, 1)
    assert "GiB to write" in capsys.readouterr().out
    with pytest.raises(HyperDFlashConfigError, match=r"needs about .* GiB and .* has"):
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


def test_rows_that_found_no_space_end_the_command_with_one_line(tmp_path, monkeypatch):
    """Found as: the scheduler died of it, and the command without a word."""
    full = mock.Mock(side_effect=OSError(28, "No space left on device"))
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", full)
        append_rows(tmp_path, "hyperdflash-capture-0", torch.ones(2, 6))
    monkeypatch.setattr(Pool, "ask", mock.AsyncMock())
    with pytest.raises(HyperDFlashError, match=r"expected 5 residual rows .* found 0; \d+ MiB"):
        asyncio.run(prefill(tmp_path)(0, SAMPLES[0]))


def test_a_capture_refuses_what_is_not_its_own_before_any_model(
    tmp_path, target_dir, capsys, monkeypatch
):
    data = tmp_path / "data.jsonl"
    line = {"instruction": "Count", "output": "1 2 3"}
    data.write_text((json.dumps(line) + "\n") * 3)
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "index.json").write_text("mine")

    def run(out, *options: str) -> str:
        command = ["capture", "--target", str(target_dir), "--data", str(data), "--out", str(out)]
        assert main([*command, *options]) == 2
        return capsys.readouterr().err

    assert "expected a new or empty folder" in run(mine)
    assert (mine / "index.json").read_text() == "mine"
    assert "is the target" in run(target_dir)
    assert "lies inside the target" in run(target_dir / "states")
    assert "does not exist" in run(tmp_path / "new", "--data", str(tmp_path / "none"))

    def second(*_):
        assert "in use by process" in run(tmp_path / "out")
        raise HyperDFlashConfigError("stop here")

    monkeypatch.setattr(capture, "_capture", second)
    assert "stop here" in run(tmp_path / "out")
    manifest = tmp_path / "out" / "manifests" / "capture-1-of-1.jsonl"
    manifest.write_text('{"data": {"digest": "a", "samples": 1, "shard_bytes": 1}}\n')
    assert "shard_mib was 1024, now 1" in run(tmp_path / "out", "--shard-mib", "1")
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path / "out", "--share", "3/2")
    assert "expected I/N with I from 1 to N, found 3/2" in capsys.readouterr().err


def test_a_capture_is_of_what_its_options_say(tmp_path, target_dir, capsys, monkeypatch):
    """Found as: --engine-args named another model or dtype, and the capture was labelled wrong."""
    data, found = tmp_path / "data.jsonl", []
    data.write_text(json.dumps({"instruction": "Count", "output": "1 2 3"}) + "\n")

    def stop(_arguments, _options, writer, _loaded):
        found.append(writer.identity.dtype)
        writer.begin(Data("digest", 1, 1))
        raise HyperDFlashConfigError("stop here")

    monkeypatch.setattr(capture, "_capture", stop)
    command = ["capture", "--target", str(target_dir), "--data", str(data)]
    command += ["--out", str(tmp_path / "out")]

    def run(of: str, **engine) -> str:
        assert main([*command, "--dtype", of, "--engine-args", json.dumps(engine)]) == 2
        return capsys.readouterr().err

    for name, instead in capture.CAPTURE_OWN.items():
        assert f"found {name}. {instead}" in run("float32", **{name: "other"})
    assert not (tmp_path / "out").exists()
    assert "stop here" in run("float32", max_total_tokens=4096)
    assert "stop here" in run("float32", mem_fraction_static=0.2)
    assert 'dtype was "float32", now "bfloat16"' in run("bfloat16")
    assert "engine_args.quantization was unset" in run("float32", quantization="fp8")
    assert found == ["float32"] * 2


def test_a_capture_keeps_to_the_target_s_context_and_lists_what_it_leaves_out(
    tmp_path, target_dir, capsys, monkeypatch
):
    """Found as: 4,096 tokens asked of a target of 2,048, and a count without any line."""
    data, out, listed = tmp_path / "data.jsonl", tmp_path / "out", "capture-1-of-1.left_out.jsonl"
    lines = [{"instruction": "Count", "output": "7 " * n} for n in (9, 3000)]
    lines.append({"messages": [{"role": "user", "content": "Four?"}]})
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(capture, "_capture", lambda *arguments: len(arguments[-1].samples) - 1)
    command = ["capture", "--target", str(target_dir), "--data", str(data), "--out", str(out)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "--max-length 4096 is cut to 2041: the context is 2048 tokens" in said
    assert f"3 rows read, 1 kept, 2 left out, listed in {out / listed}" in said
    assert f"1: {data}:2: its first answer ends after 2041 tokens" in said
    entries = [json.loads(line) for line in (out / listed).read_text().splitlines()]
    assert [entry["where"] for entry in entries] == [f"{data}:2", f"{data}:3"]
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--max-length", "0"])
    loaded = Loaded(SAMPLES, ["a:1", "a:2", "a:3", "a:4"], [0, 1, 2, 3])
    capture.check_fits(loaded, 10)
    with pytest.raises(HyperDFlashConfigError, match=r"a:2 has 9 tokens; .* holds 8"):
        capture.check_fits(loaded, 9)


@pytest.mark.parametrize(
    "asked, dtype, itemsize",
    [("float", "float32", 4), ("half", "float16", 2), ("auto", "bfloat16", 2)],
)
def test_a_capture_counts_and_names_the_dtype_that_its_engine_has(
    tmp_path, target_dir, capsys, monkeypatch, asked, dtype, itemsize
):
    """Found as: --dtype float counted half of what it wrote, and auto was a label."""
    data, found = tmp_path / "data.jsonl", []
    data.write_text(json.dumps({"instruction": "Count", "output": "1 2 3"}) + "\n")
    monkeypatch.setattr(capture, "_with_server", lambda arguments, *_: found.append(arguments))
    monkeypatch.setattr(capture, "check_space", lambda _, needed: found.append(needed))
    whole = capture.identity_of
    monkeypatch.setattr(
        capture,
        "identity_of",
        lambda files, dtype, **kinds: found.append(dtype) or whole(files, dtype, **kinds),
    )
    config = json.loads((target_dir / "config.json").read_text()) | {"dtype": "bfloat16"}
    monkeypatch.setattr(capture.TargetFiles, "config", lambda _: config)
    command = ["capture", "--target", str(target_dir), "--data", str(data)]
    assert main([*command, "--out", str(tmp_path / "out"), "--dtype", asked]) == 0
    label, needed, arguments = found
    assert (label, arguments["dtype"]) == (dtype, dtype)
    assert needed % (4 * 256 * itemsize + 4) == 0
    assert main([*command, "--out", str(tmp_path / "fp8"), "--dtype", asked, *FP8]) == 0
    assert found[4] * (4 * 256 * itemsize + 4) == needed * (4 * (256 + 4) + 4)
    assert main([*command, "--out", str(tmp_path / "out"), "--dtype", asked, *FP8]) == 2
    assert "fp8 was false, now true" in capsys.readouterr().err
    assert main([*command, "--out", str(tmp_path / "new"), "--dtype", "int8"]) == 2
    assert not (tmp_path / "new").exists()


def test_every_share_is_captured_once_and_all_together(tmp_path, monkeypatch):
    """Found as: one engine, one writer, one folder of a capture."""

    async def answered(_pool, *, rid, input_ids, **_options) -> None:
        sample = next(s for s in small.SAMPLES if s.tokens == input_ids)
        append_rows(tmp_path, rid, small.residual(sample))

    monkeypatch.setattr(Pool, "ask", answered)
    for part in (2, 1):
        with open_writer(tmp_path / "store", small.IDENTITY, f"{part}", small.KIND, {}) as writer:
            writer.begin(small.DATA)
            waiting = writer.missing(small.RANGES[part - 1 :: 2])
            asyncio.run(capture.capture_shards(prefill(tmp_path), small.SAMPLES, waiting, writer))
    source = StoreReader(tmp_path / "store")
    assert small.found(source) == small.EXPECTED
    for i, sample in enumerate(small.SAMPLES):
        assert torch.equal(source.states([i]).residual[0], small.residual(sample))


def test_a_capture_keeps_its_connections(tmp_path, monkeypatch):
    """Found as: a session, and a connection, for every sample."""
    server = Answers()

    def answer(ids):
        rid = next(p["rid"] for p in server.prompts if p["input_ids"] == ids)
        append_rows(tmp_path, rid, small.residual(next(s for s in samples if s.tokens == ids)))
        return [1]

    samples = [Sample(list(range(n)), ((2, n),)) for n in range(4, 44)]
    server.answer, loaded = answer, Loaded(samples, [""] * len(samples), [0] * len(samples))
    monkeypatch.setattr(capture, "own_server", lambda *_, **__: nullcontext(server))
    options, ranges = SimpleNamespace(concurrency=2, verbose=False, model=""), [(0, 20), (20, 40)]
    writer = mock.Mock()
    capture._with_server({}, tmp_path, options, loaded, ranges, writer)
    server.shutdown()
    assert len(server.prompts) == 40 and writer.add.call_count == 2
    assert server.connections <= 1 + 2, "one for /server_info, then one for each in flight"


@pytest.mark.parametrize("wrong", [{2}, {1, 2, 3}])
def test_conversations_with_states_that_are_not_finite_are_listed(
    tmp_path, target_dir, monkeypatch, capsys, wrong
):
    """Also by a run that captures nothing. Found as: they were stored, and ended the training."""
    data, out, asked, scratches = tmp_path / "data.jsonl", tmp_path / "out", [], set()
    lines = [{"instruction": "Count", "output": "7 " * n} for n in (9, 4, 6)]
    lines.append({"messages": [{"role": "user", "content": "Four?"}]})
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))

    async def answered(*, rid, input_ids, **_options) -> None:
        (scratch,) = scratches
        place = int(rid.removeprefix(capture_rows.REQUEST_PREFIX)) + 1
        rows = torch.ones(len(input_ids), 4 * 256)
        rows[-1, -1] = torch.nan if place in wrong else 1
        append_rows(scratch, rid, rows)
        asked.append(place)

    def serve(_arguments, scratch, _args, loaded, waiting, writer) -> None:
        scratches.add(scratch)
        # Found as: a name that another user of the machine could take first, or read in.
        assert scratch.stat().st_mode & 0o777 == 0o700 and not list(scratch.iterdir())
        pool = mock.MagicMock(ask=answered)
        one = capture.Prefill(pool, loaded.places, scratch, asyncio.Semaphore(4))
        asyncio.run(capture.capture_shards(one, loaded.samples, waiting, writer))

    monkeypatch.setattr(capture, "_with_server", serve)
    command = ["capture", "--target", str(target_dir), "--data", str(data), "--out", str(out)]
    unusable = len(wrong) == 3
    for _ in range(2):
        assert main([*command, "--dtype", "float32"]) == (2 if unusable else 0)
        said, listed = capsys.readouterr(), out / "capture-1-of-1.left_out.jsonl"
        entries = [json.loads(line) for line in listed.read_text().splitlines()]
        assert {e["where"] for e in entries} == {f"{data}:{n}" for n in (*wrong, 4)}
        assert f"{len(entries)} left out" in said.out and said.err.count("capture: ") == unusable
        assert f"{3 - len(wrong)} samples in 1 shard" in said.out
    assert sorted(asked) == [1, 2, 3] and not any(scratch.exists() for scratch in scratches)
    if not unusable:
        assert len(StoreReader(out).samples) == 2


def test_the_next_shard_is_prefilled_while_one_is_written(tmp_path, monkeypatch):
    """Found as: prefill, write, hash and index, one after another for every shard."""
    asked, begun = threading.Event(), []

    async def answered(_pool, *, rid, input_ids, **_options) -> None:
        append_rows(tmp_path, rid, torch.ones(len(input_ids), 4))
        if rid.endswith("-1"):
            asked.set()

    class Slow:
        def add(self, start, *_):
            begun.append(start)
            assert start or asked.wait(PATIENCE), "the second waited for the first"

    monkeypatch.setattr(Pool, "ask", answered)
    ranges = [(i, i + 1) for i in range(len(SAMPLES))]
    asyncio.run(capture.capture_shards(prefill(tmp_path, 1), SAMPLES, ranges, Slow()))
    assert sorted(begun) == [0, 1, 2, 3]


def test_a_shard_that_cannot_be_written_ends_the_capture(tmp_path, monkeypatch):
    async def answered(_pool, *, rid, input_ids, **_options) -> None:
        append_rows(tmp_path, rid, torch.ones(len(input_ids), 4))
        asked.append(rid)

    class Full:
        def add(self, *_):
            raise HyperDFlashError("cannot write")

    asked: list[str] = []
    monkeypatch.setattr(Pool, "ask", answered)
    many = SAMPLES * 20
    ranges = [(i, i + 1) for i in range(len(many))]
    with pytest.raises(HyperDFlashError, match="cannot write"):
        asyncio.run(capture.capture_shards(prefill(tmp_path, 1), many, ranges, Full()))
    assert len(asked) < len(many) / 2


def test_shards_that_fail_together_end_it_without_a_traceback(tmp_path, monkeypatch):
    """Found as: a server died with four shards in flight, and asyncio printed three errors."""
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


def test_a_conversation_that_the_server_refuses_is_named(tmp_path, monkeypatch):
    """Found as: answers with token ids of another tokenizer ended in a traceback."""
    monkeypatch.setattr(Pool, "ask", mock.AsyncMock(side_effect=Refused("id 9999 is unknown")))
    with pytest.raises(HyperDFlashConfigError, match=r"data.jsonl:2: .* refuses .*: id 9999"):
        asyncio.run(prefill(tmp_path)(1, SAMPLES[1]))


def test_a_writer_s_name_is_a_file_name(tmp_path, target_dir, capsys):
    """Found as: shards of ``--writer node/1`` lay in a folder where no reader looked."""
    command = ["capture", "--target", str(target_dir), "--data", "none", "--out", str(tmp_path)]
    for name in ("node/1", "../up", ".hidden", ""):
        with pytest.raises(SystemExit, match="2"):
            main([*command, "--writer", name])
        assert "--writer: expected letters, digits" in capsys.readouterr().err
    assert capture.writer_name("capture-1-of-2.b") == "capture-1-of-2.b"


def test_rows_of_every_attention_group_are_kept(tmp_path, monkeypatch):
    """Found as: under DP attention only the first group's requests had rows."""
    monkeypatch.setenv("HYPERDFLASH_CAPTURE_FOLDER", str(tmp_path))

    def run(rid: str, **ranks: int) -> torch.Tensor | None:
        parallel = {"tp_rank": 0, "attn_tp_rank": 0, "attn_cp_rank": 0} | ranks
        monkeypatch.setattr(runtime_context, "get_parallel", lambda: SimpleNamespace(**parallel))
        output = SimpleNamespace(hidden_states=torch.arange(12.0).view(6, 2))
        end = capture_rows.write_prefill_residual(
            None,
            None,
            req=SimpleNamespace(rid=rid),
            logits_output=output,
            hidden_state_offset=1,
            extend_input_len=4,
        )
        assert end == 5
        return take_rows(tmp_path, rid)

    name = capture_rows.REQUEST_PREFIX + "0"
    wanted = torch.arange(2.0, 10.0).view(4, 2)
    assert torch.equal(run(name), wanted)
    assert torch.equal(run(name, tp_rank=4), wanted)
    assert run(name, tp_rank=5, attn_tp_rank=1) is None
    assert run(name, tp_rank=6, attn_cp_rank=1) is None

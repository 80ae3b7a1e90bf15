"""Captured states on disk: shards are whole or absent, checked, streamed and resumed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from unittest import mock

import pytest
import torch

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.commands import capture
from sglang_hyperdflash.commands.capture_rows import append_rows, take_rows
from sglang_hyperdflash.tools.atomic import WriteFailed
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, HyperDFlashError
from sglang_hyperdflash.training import captured
from sglang_hyperdflash.training.captured import (
    CapturedFeatures,
    CaptureIdentity,
    CaptureWriter,
    bytes_of,
    data_digest,
    shard_ranges,
)
from sglang_hyperdflash.training.conversations import Loaded
from sglang_hyperdflash.training.samples import Sample, States

M, D = 2, 8
SAMPLES = [Sample(list(range(n)), ((2, n),)) for n in (5, 9, 4, 7)]
IDENTITY = CaptureIdentity("Target", "abc", "def", M, D, "auto", data_digest(SAMPLES))


def states(sample: Sample) -> States:
    g = torch.Generator().manual_seed(len(sample.tokens))
    n = len(sample.tokens)
    residual = torch.randn(1, n, M * D, generator=g).bfloat16()
    return States.without_layers(residual, torch.randn(1, n, D, generator=g).bfloat16())


def write(folder, ranges=((0, 2), (2, 4))) -> CaptureWriter:
    writer = CaptureWriter(folder, IDENTITY)
    for start, end in ranges:
        writer.add(start, SAMPLES[start:end], [states(s) for s in SAMPLES[start:end]])
    return writer


def test_what_was_written_is_read_padded(tmp_path):
    write(tmp_path)
    source = CapturedFeatures(tmp_path)
    assert source.samples == SAMPLES
    found = source.states([3, 0])
    assert found.residual.dtype == torch.float32
    assert found.residual.shape == (2, 7, M * D)
    assert torch.equal(found.residual[0], states(SAMPLES[3]).residual[0].float())
    assert torch.equal(found.final[1, :5], states(SAMPLES[0]).final[0].float())
    assert not found.final[1, 5:].any()


def test_ranges_follow_the_size_limit():
    size = bytes_of(SAMPLES[0], M, D, 2)
    assert size == 5 * ((M + 1) * D * 2 + 4)
    assert shard_ranges(SAMPLES, M, D, 2, 10**9) == [(0, 4)]
    assert shard_ranges(SAMPLES, M, D, 2, 1) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert shard_ranges(SAMPLES, M, D, 2, 14 * (3 * D * 2 + 4)) == [(0, 2), (2, 4)]
    assert shard_ranges([], M, D, 2, 1) == []


def test_a_capture_resumes_with_what_is_missing(tmp_path):
    write(tmp_path, [(2, 4)])
    writer = CaptureWriter(tmp_path, IDENTITY)
    assert writer.has(2, 4)
    assert not writer.has(0, 2)
    with pytest.raises(HyperDFlashConfigError, match="2 samples, not all of the data"):
        CapturedFeatures(tmp_path)
    write(tmp_path, [(0, 2)])
    assert CapturedFeatures(tmp_path).samples == SAMPLES
    (tmp_path / "states-00000002.safetensors").unlink()
    with pytest.raises(HyperDFlashConfigError, match=r"shard .* is missing. Run"):
        CapturedFeatures(tmp_path)
    assert not CaptureWriter(tmp_path, IDENTITY).has(2, 4)


def test_a_corrupt_shard_is_named(tmp_path):
    write(tmp_path)
    shard = tmp_path / "states-00000000.safetensors"
    data = bytearray(shard.read_bytes())
    data[-3] ^= 1
    shard.write_bytes(bytes(data))
    with pytest.raises(HyperDFlashConfigError, match=r"states-00000000.safetensors is corrupt"):
        CapturedFeatures(tmp_path)
    again = CaptureWriter(tmp_path, IDENTITY)
    assert again.damaged == ["states-00000000.safetensors"]
    assert [again.has(0, 2), again.has(2, 4)] == [False, True]
    write(tmp_path, [(0, 2)])
    assert CapturedFeatures(tmp_path).samples == SAMPLES


def test_a_folder_of_something_else_is_refused(tmp_path):
    write(tmp_path)
    other = CaptureIdentity("Target", "abc", "def", M, D, "auto", data_digest(SAMPLES[:1]))
    with pytest.raises(HyperDFlashConfigError, match="holds a capture of another target"):
        CaptureWriter(tmp_path, other)
    for damage in ("{", "[]", (tmp_path / "index.json").read_text().replace("spans", "spins")):
        (tmp_path / "index.json").write_text(damage)
        with pytest.raises(HyperDFlashConfigError, match=r"index.json is damaged .* Run `hyperd"):
            CapturedFeatures(tmp_path)
        again = CaptureWriter(tmp_path, IDENTITY)
        assert again.damaged == ["index.json"] and not again.has(0, 2)
    with pytest.raises(FileNotFoundError, match="holds no capture"):
        CapturedFeatures(tmp_path / "nowhere")


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    write(tmp_path, [(0, 2)])

    def run_out_of_space(_tensors, path) -> None:
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(captured, "save_file", run_out_of_space)
    with pytest.raises(WriteFailed, match=r"states-00000002.safetensors: No space left .* Free"):
        write(tmp_path, [(2, 4)])
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["index.json", "states-00000000.safetensors"]
    assert len(json.loads((tmp_path / "index.json").read_text())["shards"]) == 1


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
    monkeypatch.setattr(capture, "ask", mock.AsyncMock())
    with pytest.raises(HyperDFlashError, match=r"expected 5 residual rows .* found 0; \d+ MiB"):
        asyncio.run(capture.prefill_all(mock.Mock(), tmp_path, SAMPLES[:1], 0, 1))


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
    (tmp_path / "out" / "shard").write_text("x")
    assert "shard_mib was 1024, now 1" in run(tmp_path / "out", "--shard-mib", "1")


def test_a_capture_is_of_what_its_options_say(tmp_path, target_dir, capsys, monkeypatch):
    """Found as: --engine-args named another model or dtype, and the capture was labelled wrong."""
    data, found = tmp_path / "data.jsonl", []
    data.write_text(json.dumps({"instruction": "Count", "output": "1 2 3"}) + "\n")

    def stop(_folder, identity):
        found.append(identity.dtype)
        (tmp_path / "out" / "shard").write_text("x")
        raise HyperDFlashConfigError("stop here")

    monkeypatch.setattr(capture, "CaptureWriter", stop)
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
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    lines = [{"instruction": "Count", "output": "7 " * n} for n in (9, 3000)]
    lines.append({"messages": [{"role": "user", "content": "Four?"}]})
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(capture, "_capture", lambda *arguments: len(arguments[-1].samples) - 1)
    command = ["capture", "--target", str(target_dir), "--data", str(data), "--out", str(out)]
    assert main(command) == 0
    said = capsys.readouterr().out
    assert "--max-length 4096 is cut to 2041: the context is 2048 tokens" in said
    assert f"left out {data}:2: over 2041 tokens" in said
    assert f"2 left out: listed in {out / 'left_out.jsonl'}" in said
    listed = [json.loads(line) for line in (out / "left_out.jsonl").read_text().splitlines()]
    assert [entry["where"] for entry in listed] == [f"{data}:2", f"{data}:3"]
    with pytest.raises(SystemExit, match="2"):
        main([*command, "--max-length", "0"])
    loaded = Loaded(SAMPLES, ["a:1", "a:2", "a:3", "a:4"], [], [])
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
    whole = capture.CaptureWriter
    write = lambda folder, identity: found.append(identity.dtype) or whole(folder, identity)  # noqa: E731
    monkeypatch.setattr(capture, "CaptureWriter", write)
    config = json.loads((target_dir / "config.json").read_text()) | {"dtype": "bfloat16"}
    monkeypatch.setattr(capture.TargetFiles, "config", lambda _: config)
    command = ["capture", "--target", str(target_dir), "--data", str(data)]
    assert main([*command, "--out", str(tmp_path / "out"), "--dtype", asked]) == 0
    label, needed, arguments = found
    assert (label, arguments["dtype"]) == (dtype, dtype)
    assert needed % (5 * 256 * itemsize + 4) == 0
    assert main([*command, "--out", str(tmp_path / "new"), "--dtype", "int8"]) == 2
    assert not (tmp_path / "new").exists()

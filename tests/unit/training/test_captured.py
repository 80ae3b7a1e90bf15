"""Captured states on disk: shards are whole or absent, checked, streamed and resumed."""

from __future__ import annotations

import json

import pytest
import torch

from sglang_hyperdflash.commands import capture
from sglang_hyperdflash.serving.capture_rows import append_rows, take_rows
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training import captured
from sglang_hyperdflash.training.captured import (
    CapturedFeatures,
    CaptureIdentity,
    CaptureWriter,
    bytes_of,
    data_digest,
    shard_ranges,
)
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
    write(tmp_path, [(0, 2)])
    assert CapturedFeatures(tmp_path).samples == SAMPLES
    (tmp_path / "states-00000002.safetensors").unlink()
    with pytest.raises(HyperDFlashConfigError, match=r"shard .* is missing; run"):
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


def test_a_folder_of_something_else_is_refused(tmp_path):
    write(tmp_path)
    other = CaptureIdentity("Target", "abc", "def", M, D, "auto", data_digest(SAMPLES[:1]))
    with pytest.raises(HyperDFlashConfigError, match="holds a capture of another target"):
        CaptureWriter(tmp_path, other)
    (tmp_path / "index.json").write_text("{")
    with pytest.raises(HyperDFlashConfigError, match="is not JSON"):
        CapturedFeatures(tmp_path)
    with pytest.raises(FileNotFoundError, match="holds no capture"):
        CapturedFeatures(tmp_path / "nowhere")


def test_a_full_disk_leaves_nothing_half_written(tmp_path, monkeypatch):
    write(tmp_path, [(0, 2)])

    def run_out_of_space(_tensors, path):
        path.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(captured, "save_file", run_out_of_space)
    with pytest.raises(OSError, match=r"No space left .* Earlier shards are whole"):
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

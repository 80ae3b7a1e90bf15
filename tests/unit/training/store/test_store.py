"""Shards are whole or absent, checked once, written by many and read by many."""

from __future__ import annotations

import multiprocessing
import os
import resource
import threading
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from sglang_hyperdflash.tools.atomic import WriteFailed
from sglang_hyperdflash.tools.errors import BadRow, HyperDFlashConfigError
from sglang_hyperdflash.tools.ownership import InUse, NotOurs
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.samples import Sample
from sglang_hyperdflash.training.store import manifest as manifest_module
from sglang_hyperdflash.training.store import reader as reader_module
from sglang_hyperdflash.training.store import writer as writer_module
from sglang_hyperdflash.training.store.manifest import (
    Data,
    Manifest,
    content_hash,
    data_digest,
    read_shards,
)
from sglang_hyperdflash.training.store.reader import StoreReader
from sglang_hyperdflash.training.store.stream import StreamReader
from sglang_hyperdflash.training.store.writer import bytes_of, open_writer, shard_ranges
from tests.unit.training.store.small import (
    DATA,
    EXPECTED,
    IDENTITY,
    KIND,
    RANGES,
    SAMPLES,
    SHARD_BYTES,
    D,
    M,
    add,
    broken,
    found,
    residual,
    write,
)

FIRST, SECOND = "one-00000000.safetensors", "one-00000002.safetensors"


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(bytes(data))


def test_what_was_written_is_read_padded_in_its_own_dtype(tmp_path):
    write(tmp_path)
    source = StoreReader(tmp_path)
    assert found(source) == EXPECTED
    assert source.lengths.tolist() == [5, 9, 6, 7]
    assert [s.answer_tokens for s in source.samples] == [s.answer_tokens for s in SAMPLES]
    states = source.states([3, 0])
    assert states.residual.dtype == torch.bfloat16 and states.residual.shape == (2, 7, M * D)
    assert torch.equal(states.residual[0], residual(SAMPLES[3]))
    assert torch.equal(states.residual[1, :5], residual(SAMPLES[0]))
    assert not states.residual[1, 5:].any()
    assert states.layers.shape == (2, 7, 0)
    assert states.to(torch.device("cpu")).residual.dtype == torch.float32
    with pytest.raises(IndexError):
        source.samples[4]


def test_a_shard_is_a_safetensors_file(tmp_path):
    write(tmp_path)
    tensors = load_file(tmp_path / "shards" / SECOND)
    assert set(tensors) == {"tokens", "residual"}
    assert tensors["tokens"].tolist() == SAMPLES[2].tokens + SAMPLES[3].tokens
    rows = torch.cat([residual(SAMPLES[2]), residual(SAMPLES[3])])
    assert torch.equal(tensors["residual"], rows.view(-1, M, D))


def test_layers_are_kept_next_to_the_residual(tmp_path):
    identity = replace(IDENTITY, layer_ids=(1, 3))
    layers = [residual(sample) + 1 for sample in SAMPLES]
    with open_writer(tmp_path, identity, "one", KIND, {}) as writer:
        writer.begin(DATA)
        writer.add(0, SAMPLES, [(residual(s), x) for s, x in zip(SAMPLES, layers, strict=True)])
    states = StoreReader(tmp_path).states([1])
    assert torch.equal(states.layers[0], layers[1])
    assert torch.equal(states.residual[0], residual(SAMPLES[1]))


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("wrong", [{1}, {0, 1}, {0, 3}])
def test_a_sample_that_is_not_finite_is_left_out_of_its_shard(tmp_path, fp8, wrong):
    """Found as: the trainer ended at it, and again after every restart."""
    states = [(broken(s) if i in wrong else residual(s),) for i, s in enumerate(SAMPLES)]
    with open_writer(tmp_path, replace(IDENTITY, fp8=fp8), "one", KIND, {}) as writer:
        writer.begin(DATA)
        for start, end in reversed(RANGES):
            writer.add(start, SAMPLES[start:end], states[start:end])
        assert writer.left_out == sorted(wrong) and writer.missing(RANGES) == []
    kept = [i for i in range(len(SAMPLES)) if i not in wrong]
    stream = StreamReader(tmp_path, 100, 9)
    stream.refresh(ProcessGroup())
    assert len(stream.held_out) == len(kept)
    for source in (StoreReader(tmp_path), stream):
        assert found(source) == [EXPECTED[i] for i in kept]
        for place, i in enumerate(kept):
            states = source.states([place]).residual[0]
            close = {"rtol": 0.1, "atol": 0.02} if fp8 else {"rtol": 0, "atol": 0}
            torch.testing.assert_close(states, residual(SAMPLES[i]), **close)


@pytest.mark.parametrize("fp8", [False, True])
def test_a_store_that_holds_such_a_sample_names_it(tmp_path, monkeypatch, fp8):
    """Found as: advice to lower the learning rate, where it had no part."""
    with open_writer(tmp_path, replace(IDENTITY, fp8=fp8), "one", KIND, {}) as writer:
        writer.begin(DATA)
        with monkeypatch.context() as patched:  # written before it was left out
            patched.setattr(writer_module, "is_finite", lambda _: True)
            writer.add(0, SAMPLES[:2], [(residual(SAMPLES[0]),), (broken(SAMPLES[1]),)])
        add(writer, RANGES[1:])
    source = StoreReader(tmp_path)
    source.states([0, 2, 3])
    place = rf"sample 1 .* rows 5 to 13 of .*/{FIRST}"
    with pytest.raises(HyperDFlashConfigError, match=place):
        source.states([2, 1])


def test_ranges_follow_the_size_limit():
    size = bytes_of(SAMPLES[0], IDENTITY)
    assert size == 5 * (M * D * 2 + 4)
    assert shard_ranges(SAMPLES, IDENTITY, 10**9) == [(0, 4)]
    assert shard_ranges(SAMPLES, IDENTITY, 1) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert shard_ranges([], IDENTITY, 1) == []


def test_prefetched_states_are_the_same_and_read_before_they_are_asked_for(tmp_path, monkeypatch):
    write(tmp_path)
    source, threads = StoreReader(tmp_path), set()
    whole = reader_module.OpenShard.read

    def read(self, *arguments) -> None:
        threads.add(threading.current_thread())
        whole(self, *arguments)

    monkeypatch.setattr(reader_module.OpenShard, "read", read)
    source.prefetch([2, 1])
    for _, reads in source._begun.values():
        for each in reads:
            each.result()
    assert threads and threading.main_thread() not in threads
    (tmp_path / "shards").rename(tmp_path / "elsewhere")
    states = source.states([2, 1])
    assert torch.equal(states.residual[1, :9], residual(SAMPLES[1]))
    assert torch.equal(states.residual[0, :6], residual(SAMPLES[2]))


def test_an_unfinished_data_set_is_refused_and_resumed(tmp_path):
    write(tmp_path, [(2, 4)])
    with pytest.raises(HyperDFlashConfigError, match="2 of 4 samples, not all of the data"):
        StoreReader(tmp_path)
    with open_writer(tmp_path, IDENTITY, "one", KIND, {}) as writer:
        writer.begin(DATA)
        assert writer.missing(RANGES) == [(0, 2)]
        add(writer, [(0, 2)])
    assert found(StoreReader(tmp_path)) == EXPECTED
    (tmp_path / "shards" / SECOND).unlink()
    with pytest.raises(HyperDFlashConfigError, match=r"shard .*-00000002.* is missing\. Run"):
        StoreReader(tmp_path)
    with open_writer(tmp_path, IDENTITY, "one", KIND, {}) as writer:
        assert writer.damaged == [SECOND]
        assert writer.missing(RANGES) == [(2, 4)]


def test_a_corrupt_shard_is_named_and_only_that_one_is_written_again(tmp_path):
    write(tmp_path)
    flip(tmp_path / "shards" / FIRST)
    source = StoreReader(tmp_path)
    assert torch.equal(source.states([2]).residual[0], residual(SAMPLES[2]))
    with pytest.raises(HyperDFlashConfigError, match=rf"{FIRST} is corrupt: .* Remove it\. Run"):
        source.states([0])
    with open_writer(tmp_path, IDENTITY, "one", KIND, {}) as writer:
        assert writer.damaged == [FIRST]
        assert writer.missing(RANGES) == [(0, 2)]
        add(writer, [(0, 2)])
    again = StoreReader(tmp_path)
    assert found(again) == EXPECTED
    assert torch.equal(again.states([1]).residual[0], residual(SAMPLES[1]))


def test_a_checksum_is_verified_once_for_all_readers(tmp_path):
    """Found as: every rank hashed every shard at every start, terabytes of them."""
    write(tmp_path)
    shard = tmp_path / "shards" / FIRST
    assert found(StoreReader(tmp_path)) == EXPECTED
    before = shard.stat()
    flip(shard)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))  # no second look at the bytes
    assert not torch.equal(StoreReader(tmp_path).states([1]).residual[0], residual(SAMPLES[1]))
    os.utime(shard)  # another file: looked at again
    with pytest.raises(HyperDFlashConfigError, match="is corrupt"):
        StoreReader(tmp_path).states([1])


def test_starting_reads_no_shard(tmp_path):
    """Found as: a start-up that opened, hashed and listed everything."""
    write(tmp_path)
    for path in (tmp_path / "shards").iterdir():
        path.write_bytes(b"")
    source = StoreReader(tmp_path)
    assert source.lengths.tolist() == [5, 9, 6, 7]
    assert [sample.spans for sample in source.samples] == [sample.spans for sample in SAMPLES]


def test_memory_of_a_reader_does_not_grow_with_tokens(tmp_path):
    """Found as: 40 bytes a token in every process."""
    identity = replace(IDENTITY, hc_mult=1, hidden_size=1)
    sample, shards = Sample(list(range(100_000)), ((5, 100_000),)), 30
    with open_writer(tmp_path, identity, "one", KIND, {}) as writer:
        writer.begin(Data("digest", shards, 1))
        for i in range(shards):
            writer.add(i, [sample], [(torch.ones(100_000, 1),)])
    tracemalloc.start()
    source = StoreReader(tmp_path)
    assert sum(int(each.tokens[-1]) for each in source.samples) == shards * 99_999
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000 * shards, f"{peak / (100_000 * shards):.2f} bytes a token"


def test_a_writer_opens_a_store_of_other_times_without_reading_it(tmp_path, monkeypatch):
    """Found by reading: a server hashed all that it had recorded before it started."""
    write(tmp_path)
    for path in (tmp_path / "shards").iterdir():
        os.utime(path, (0, 0))
    hashed = []
    monkeypatch.setattr(manifest_module, "file_hash", lambda path: hashed.append(path))
    with open_writer(tmp_path, IDENTITY, "one", KIND, {}) as writer:
        assert writer.position == 4 and not hashed
        assert writer.damaged == [FIRST, SECOND] and len(hashed) == 2


def test_an_added_shard_writes_one_line_however_many_there_are(tmp_path):
    """Found as: the whole index was written again for every shard, hours of a capture."""
    with open_writer(tmp_path, IDENTITY, "one", KIND, {}) as writer:
        writer.begin(Data("digest", 100, 1))
        path, sizes = tmp_path / "manifests" / "one.jsonl", []
        inode, written = path.stat().st_ino, path.read_bytes()
        for i in range(100):
            writer.add(i, SAMPLES[:1], [(residual(SAMPLES[0]),)])
            content = path.read_bytes()
            assert content.startswith(written)
            sizes.append(len(content) - len(written))
            written = content
    assert path.stat().st_ino == inode
    assert max(sizes) <= min(sizes) + 8  # digits of the position
    changed = [p for p in tmp_path.rglob("*") if p.is_file() and p.suffix != ".safetensors"]
    assert sorted(p.name for p in changed) == [
        ".hyperdflash.json",
        ".one.jsonl.hyperdflash.json",
        "one.jsonl",
    ]


def _fill(folder: str, name: str, ranges) -> None:
    write(Path(folder), ranges, name)


def test_processes_write_to_one_store_at_once(tmp_path):
    """Found as: one engine, one writer, one folder."""
    context = multiprocessing.get_context("fork")
    writers = [
        context.Process(target=_fill, args=(str(tmp_path), f"writer-{i}", [RANGES[i % 2]]))
        for i in range(4)  # two of them write the same
    ]
    for each in writers:
        each.start()
    for each in writers:
        each.join()
        assert each.exitcode == 0
    assert found(StoreReader(tmp_path)) == EXPECTED
    assert [shard.start for shard in read_shards(tmp_path)] == [0, 2]


def test_a_writer_of_the_same_name_is_refused_and_others_are_not(tmp_path):
    with open_writer(tmp_path, IDENTITY, "one", KIND, {}) as writer:
        add(writer, [(0, 2)])
        with (
            pytest.raises(InUse, match=r"one.jsonl is in use by process"),
            open_writer(tmp_path, IDENTITY, "one", KIND, {}),
        ):
            pass
        with open_writer(tmp_path, IDENTITY, "two", KIND, {}) as other:
            other.begin(DATA)
            assert other.missing(RANGES) == [(2, 4)]  # what the first one's are, it leaves
            add(other, [(2, 4)])
        assert found(StoreReader(tmp_path)) == EXPECTED


def test_a_line_that_is_being_written_is_not_there_yet(tmp_path):
    write(tmp_path)
    path = tmp_path / "manifests" / "one.jsonl"
    whole = path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:-1]) + lines[-1][:40])
    assert list(Manifest.read(path).shards) == [0]
    with open_writer(tmp_path, IDENTITY, "one", KIND, {}) as writer:  # after a kill: cut off
        assert writer.missing(RANGES) == [(2, 4)]
        add(writer, [(2, 4)])
    assert found(StoreReader(tmp_path)) == EXPECTED
    path.write_bytes(whole.replace(b'{"shard"', b'{"shart"', 1))
    with pytest.raises(HyperDFlashConfigError, match=r"one.jsonl: expected the manifest of"):
        StoreReader(tmp_path)
    path.write_bytes(whole.replace(b'{"shard"', b'"shard"', 1))
    with pytest.raises(BadRow, match=r"one.jsonl:2: expected a JSON object"):
        StoreReader(tmp_path)


def test_a_folder_of_something_else_is_refused(tmp_path):
    write(tmp_path / "store")
    other = replace(IDENTITY, dtype="float32")
    with (
        pytest.raises(NotOurs, match='dtype was "bfloat16", now "float32"'),
        open_writer(tmp_path / "store", other, "two", KIND, {}),
    ):
        pass
    with (
        pytest.raises(NotOurs, match="other settings: length was unset, now 3"),
        open_writer(tmp_path / "store", IDENTITY, "one", KIND, {"length": 3}),
    ):
        pass
    mine = tmp_path / "mine"
    mine.mkdir()
    (mine / "thesis.txt").write_text("mine")
    with (
        pytest.raises(NotOurs, match="expected a new or empty folder"),
        open_writer(mine, IDENTITY, "one", KIND, {}),
    ):
        pass
    assert [path.name for path in mine.iterdir()] == ["thesis.txt"]
    with pytest.raises(FileNotFoundError, match="is no store"):
        StoreReader(mine)


@pytest.mark.parametrize("name", ["one", "two"])
def test_a_data_set_cut_in_two_ways_is_refused(tmp_path, name):
    """Its shards would overlap, and samples come twice."""
    write(tmp_path, [(0, 2)])
    with (
        open_writer(tmp_path, IDENTITY, name, KIND, {}) as writer,
        pytest.raises(HyperDFlashConfigError, match=r"found 4 in shards of 504"),
    ):
        writer.begin(replace(DATA, shard_bytes=99))


def test_a_full_disk_leaves_nothing_half_written(tmp_path):
    write(tmp_path, [(0, 2)])
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
    try:
        with pytest.raises(WriteFailed, match=r"cannot write .*one-00000002.safetensors: .* Free"):
            write(tmp_path, [(2, 4)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [path.name for path in (tmp_path / "shards").iterdir()] == [FIRST]
    assert list(Manifest.read(tmp_path / "manifests" / "one.jsonl").shards) == [0]
    write(tmp_path, [(2, 4)])
    assert found(StoreReader(tmp_path)) == EXPECTED


def test_a_store_s_hash_is_of_its_samples_and_not_of_who_wrote_them(tmp_path):
    write(tmp_path / "one")
    write(tmp_path / "two", [(2, 4)], "b")
    write(tmp_path / "two", [(0, 2)], "a")
    hashes = {content_hash(tmp_path / name) for name in ("one", "two")}
    assert len(hashes) == 1
    other = Data(data_digest(SAMPLES[:2]), 2, SHARD_BYTES)
    with open_writer(tmp_path / "three", IDENTITY, "one", KIND, {}) as writer:
        writer.begin(other)
        writer.add(0, SAMPLES[:2], [(residual(sample),) for sample in SAMPLES[:2]])
    assert content_hash(tmp_path / "three") not in hashes
    assert data_digest(SAMPLES) != data_digest(SAMPLES[:3])


def test_a_shard_that_was_captured_again_is_the_same_data(tmp_path):
    """Found as: after one corrupt shard was repeated, as the reader had said, the training that
    had met it was refused: its data were others. A GPU gives no bit twice.
    """
    write(tmp_path)
    before = content_hash(tmp_path)
    (tmp_path / "shards" / FIRST).unlink()
    with open_writer(tmp_path, IDENTITY, "one", KIND, {}) as writer:
        writer.begin(DATA)
        assert writer.missing(RANGES) == [(0, 2)]
        nearly = [(residual(sample) * 1.01,) for sample in SAMPLES[:2]]
        writer.add(0, SAMPLES[:2], nearly)
    assert not torch.equal(StoreReader(tmp_path).states([0]).residual[0], residual(SAMPLES[0]))
    assert content_hash(tmp_path) == before


def test_a_shard_that_a_listing_does_not_show_yet_is_there(tmp_path, monkeypatch):
    """Found as: one that was added between the listing and its line was missing, and one that
    another node had just added.
    """
    write(tmp_path)
    monkeypatch.setattr(manifest_module, "shard_files", lambda _folder: {FIRST})
    assert found(StoreReader(tmp_path)) == EXPECTED
    (tmp_path / "shards" / SECOND).unlink()
    with pytest.raises(HyperDFlashConfigError, match=r"-00000002.* is missing\. Run"):
        StoreReader(tmp_path)


def test_shards_that_overlap_are_no_whole_data_set(tmp_path):
    """Two shares that began at one moment with other sizes: as many samples, and not all."""
    write(tmp_path, [(0, 2)])
    with open_writer(tmp_path, IDENTITY, "two", KIND, {}) as writer:
        writer.begin(DATA)
        writer.add(1, SAMPLES[1:3], [(residual(sample),) for sample in SAMPLES[1:3]])
    with pytest.raises(
        HyperDFlashConfigError, match=r"holds 3 of 4 samples, not all .*or remove \S*/two.jsonl to"
    ):
        StoreReader(tmp_path)


def test_a_shard_s_line_is_on_the_disk_before_the_next_one_begins(tmp_path, monkeypatch):
    """Found by reading: over NFS lines reached other nodes with holes in them, and a full quota is
    known at the flush alone.
    """
    flushed, whole = [], os.fsync

    def fsync(number: int) -> None:
        if Path(os.readlink(f"/proc/self/fd/{number}")).name == "one.jsonl":
            flushed.append(os.fstat(number).st_size)
            if len(flushed) == 2:
                raise OSError(122, "Disk quota exceeded")
        whole(number)

    monkeypatch.setattr(os, "fsync", fsync)
    with (
        pytest.raises(WriteFailed, match=r"one.jsonl: Disk quota exceeded"),
        open_writer(tmp_path, IDENTITY, "one", KIND, {}) as writer,
    ):
        add(writer)
    assert flushed[0] < flushed[1]

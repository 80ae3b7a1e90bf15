"""Shards and their readers: what :mod:`.test_machine` does not reach."""

import hashlib
import multiprocessing
import os
import tracemalloc
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from sglang_hyperdflash.tools.errors import BadRow, HyperDFlashConfigError
from sglang_hyperdflash.tools.ownership import NotOurs
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.samples import Sample
from sglang_hyperdflash.training.store import manifest as manifest_module
from sglang_hyperdflash.training.store import reader as reader_module
from sglang_hyperdflash.training.store.manifest import Data, Shard, content_hash, read_shards
from sglang_hyperdflash.training.store.reader import StoreReader
from sglang_hyperdflash.training.store.retention import surplus
from sglang_hyperdflash.training.store.writer import bytes_of, shard_ranges
from tests.unit.training.store import small
from tests.unit.training.store.small import IDENTITY, SAMPLES, STATES, contents, opened, write
from tests.unit.training.streams import refreshed

FIRST, SECOND = "one-00000000.safetensors", "one-00000002.safetensors"


@pytest.mark.parametrize("fp8", [False, True])
def test_any_reader_of_safetensors_reads_a_shard(tmp_path, fp8):
    identity = replace(IDENTITY, hidden_size=512, fp8=fp8)
    rows = [torch.randn(len(s.tokens), small.M * 512).bfloat16() for s in SAMPLES[:2]]
    with opened(tmp_path, identity=identity) as writer:
        writer.add(0, SAMPLES[:2], [(x,) for x in rows])
    path = tmp_path / "shards" / FIRST
    tensors = load_file(path)
    assert tensors["tokens"].tolist() == SAMPLES[0].tokens + SAMPLES[1].tokens
    size = sum(bytes_of(sample, identity) for sample in SAMPLES[:2])
    assert sum(x.nbytes for x in tensors.values()) == size <= path.stat().st_size < size + 500
    values, written = tensors["residual"], torch.cat(rows).view(-1, small.M, 512)
    if not fp8:
        assert torch.equal(values, written) and size == 14 * (small.M * 512 * 2 + 4)
        return
    scales = tensors["residual_scale"]
    assert values.dtype == torch.float8_e4m3fn and size < 14 * small.M * 512 * 2 * 0.52
    assert values.float().abs().amax(-1).eq(448).all()
    read = StoreReader(tmp_path).states([0, 1]).residual
    assert torch.equal((values.float() * scales.unsqueeze(-1)).bfloat16()[5:].flatten(1), read[1])


def test_ranges_follow_the_size_limit():
    every = {10**9: [(0, 4)], 1: [(0, 1), (1, 2), (2, 3), (3, 4)], small.SHARD_BYTES: small.RANGES}
    for limit, ranges in every.items():
        assert shard_ranges(SAMPLES, IDENTITY, limit) == ranges
    assert shard_ranges([], IDENTITY, 1) == []


@pytest.mark.parametrize(
    ("damage", "error", "place"),
    [('{"shart"', HyperDFlashConfigError, "one.jsonl: "), ('"shard"', BadRow, "one.jsonl:2: ")],
)
def test_a_damaged_manifest_is_named(tmp_path, damage, error, place):
    write(tmp_path)
    path = tmp_path / "manifests" / "one.jsonl"
    path.write_text(path.read_text().replace('{"shard"', damage, 1))
    with pytest.raises(error, match=place):
        StoreReader(tmp_path)


def test_processes_write_to_one_store_at_once(tmp_path):
    """Two of them write the same."""
    context = multiprocessing.get_context("fork")
    writers = [(tmp_path, [small.RANGES[i % 2]], f"writer-{i}") for i in range(4)]
    with context.Pool(4, context.Barrier(4).wait) as processes:
        processes.starmap(write, writers, chunksize=1)
    assert contents(StoreReader(tmp_path)) == SAMPLES
    assert [shard.start for shard in read_shards(tmp_path)] == [0, 2]


def test_a_data_set_cut_in_two_ways_is_no_whole_one(tmp_path):
    """Shards would overlap. Two shares that begin at one moment do not see each other's sizes."""
    write(tmp_path, [(0, 2)])
    for name in ("one", "two"):
        with opened(tmp_path, name) as writer, pytest.raises(HyperDFlashConfigError, match="504"):
            writer.begin(replace(small.DATA, shard_bytes=99))
    write(tmp_path, [(1, 3)], "two")
    with pytest.raises(HyperDFlashConfigError, match=r"3 of 4 samples.* \S*/two.jsonl"):
        StoreReader(tmp_path)


def test_a_folder_of_something_else_is_no_store(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(NotOurs):
        opened(tmp_path).__enter__()
    with pytest.raises(FileNotFoundError):
        StoreReader(tmp_path)


def test_a_hash_is_of_the_samples_and_not_of_who_wrote_them_or_how_often(tmp_path):
    """A GPU gives no bit twice: a shard that was captured again is the same data."""
    write(tmp_path / "one")
    write(tmp_path / "two", [(2, 4)], "b")
    write(tmp_path / "two", [(0, 2)], "a")
    known = content_hash(tmp_path / "one")
    assert content_hash(tmp_path / "two") == known
    (tmp_path / "one" / "shards" / FIRST).unlink()
    with opened(tmp_path / "one") as writer:
        writer.add(0, SAMPLES[:2], [(rows * 1.01,) for rows in STATES[:2]])
    assert not torch.equal(StoreReader(tmp_path / "one").states([0]).residual[0], STATES[0])
    assert content_hash(tmp_path / "one") == known
    with opened(tmp_path / "three") as writer:
        writer.begin(Data(manifest_module.data_digest(SAMPLES[:2]), 2, small.SHARD_BYTES))
        writer.add(0, SAMPLES[:2], [(rows,) for rows in STATES[:2]])
    assert content_hash(tmp_path / "three") != known


def test_a_start_reads_no_shard(tmp_path, monkeypatch):
    """Neither a reader's nor that of a writer whose files have other times, as a copy's have."""
    write(tmp_path)
    for path in (tmp_path / "shards").iterdir():
        path.write_bytes(b"")
    source, hashed = StoreReader(tmp_path), []
    assert source.lengths.tolist() == [5, 9, 6, 7]
    assert [sample.spans for sample in source.samples] == [sample.spans for sample in SAMPLES]
    assert source.samples[1].answer_tokens == SAMPLES[1].answer_tokens
    with pytest.raises(IndexError):
        source.samples[4]
    monkeypatch.setattr(manifest_module, "file_hash", hashed.append)
    with opened(tmp_path) as writer:
        assert writer.position == 4 and not hashed
        assert writer.damaged == [FIRST, SECOND] and len(hashed) == 2


def test_a_checksum_is_verified_once_for_all_readers(tmp_path):
    write(tmp_path)
    shard = tmp_path / "shards" / FIRST
    assert contents(StoreReader(tmp_path)) == SAMPLES
    before = shard.stat()
    small.flip(shard)
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns))  # no second look at the bytes
    assert not torch.equal(StoreReader(tmp_path).states([1]).residual[0], STATES[1])
    os.utime(shard, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))  # another file
    with pytest.raises(HyperDFlashConfigError, match="is corrupt"):
        StoreReader(tmp_path).states([1])


def test_a_shard_that_a_listing_does_not_show_yet_is_there(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setattr(manifest_module, "shard_files", lambda _folder: {FIRST})
    assert contents(StoreReader(tmp_path)) == SAMPLES


def test_prefetched_states_are_read_before_they_are_asked_for(tmp_path):
    write(tmp_path)
    source = StoreReader(tmp_path)
    source.prefetch([2, 1])
    for _, reads in source._begun.values():
        for read in reads:
            read.result()
    (tmp_path / "shards").rename(tmp_path / "elsewhere")
    states = source.states([2, 1])
    assert torch.equal(states.residual[1, :9], STATES[1])
    assert states.to(torch.device("cpu")).residual.dtype == torch.float32


def test_memory_of_a_reader_does_not_grow_with_tokens(tmp_path):
    identity = replace(IDENTITY, hc_mult=1, hidden_size=1)
    sample, shards = Sample(list(range(100_000)), ((5, 100_000),)), 30
    with opened(tmp_path, identity=identity) as writer:
        for i in range(shards):
            writer.add(i, [sample], [(torch.ones(100_000, 1),)])
    tracemalloc.start()
    source = StoreReader(tmp_path)
    assert sum(int(each.tokens[-1]) for each in source.samples) == shards * 99_999
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100_000 * shards, f"{peak / (100_000 * shards):.2f} bytes a token"


def test_a_window_leaves_out_what_no_block_sees(tmp_path):
    """Of spans (2, 3) and (4, n): the first block's anchor is token 2."""
    write(tmp_path)
    source, whole = StoreReader(tmp_path, window=1), StoreReader(tmp_path)
    assert source.lengths.tolist() == [4, 8, 5, 6]
    assert source.answers.tolist() == whole.answers.tolist() == [2, 6, 3, 4]
    for sample, cut in zip(SAMPLES, source.samples, strict=True):
        assert cut.tokens.tolist() == sample.tokens[1:]
        assert cut.spans == tuple((start - 1, end - 1) for start, end in sample.spans)
    states, full = source.states([1, 0]).residual, whole.states([1, 0]).residual
    assert torch.equal(states[:, :4], full[:, 1:5]) and states.shape[1] == 8
    assert StoreReader(tmp_path, window=2).lengths.tolist() == whole.lengths.tolist()


def test_several_stores_are_read_as_one(tmp_path):
    write(tmp_path / "a")
    write(tmp_path / "b")
    source = StoreReader([tmp_path / "a", tmp_path / "b"])
    assert source.counts == [4, 4] and contents(source) == SAMPLES * 2
    states = source.states([1, 5]).residual
    assert torch.equal(states[0], states[1])
    with opened(tmp_path / "c", identity=replace(IDENTITY, hc_mult=1)):
        pass
    with pytest.raises(HyperDFlashConfigError, match="two targets"):
        StoreReader([tmp_path / "a", tmp_path / "c"])


def test_what_was_just_written_is_not_hashed_again(tmp_path, monkeypatch):
    write(tmp_path)
    hashed = []
    monkeypatch.setattr(reader_module, "file_hash", hashed.append)
    assert contents(StoreReader(tmp_path)) == SAMPLES and not hashed


def test_no_more_is_read_ahead_than_fits(tmp_path, monkeypatch):
    """States that do not fit are read when they are asked for."""
    write(tmp_path)
    source = StoreReader(tmp_path)
    monkeypatch.setattr(reader_module, "PREFETCH_BYTES", STATES[0].nbytes + 1)
    for i in range(4):
        source.prefetch([i])
    assert list(source._begun) == [(0,), (1,)]
    assert torch.equal(source.states([3]).residual[0], STATES[3])
    assert list(source._begun) == [(0,), (1,)]


def test_the_newest_stay_and_a_uniform_sample_of_the_others():
    shards: list[Shard] = []
    for number in range(1000):
        digest = hashlib.sha256(str(number).encode()).hexdigest()
        shards.append(Shard(f"{number}", digest, 10, 0, "one", number, [1], [[]]))
        gone = {each.start for each in surplus(shards, 1000, 0.5)}
        shards = [each for each in shards if each.start not in gone]
        assert sum(each.size for each in shards) <= 1000
    starts = [each.start for each in shards]
    assert len(starts) == 100 and starts[-50:] == list(range(950, 1000))
    assert 15 <= sum(start < 475 for start in starts[:50]) <= 35  # of 950, half are such


def test_a_refresh_reads_only_what_is_new(tmp_path):
    with opened(tmp_path) as writer:
        small.put(writer, *SAMPLES[:3])
        stream = refreshed(tmp_path, 9)
        for path in (tmp_path / "shards").iterdir():
            path.write_bytes(b"")
        with (tmp_path / "manifests" / "one.jsonl").open("r+b") as file:
            file.write(b"x" * 10)
        small.put(writer, SAMPLES[3])
        stream.refresh(ProcessGroup())
    assert stream.lengths.tolist() == [len(sample.tokens) for sample in SAMPLES]


def test_no_flipped_bit_of_a_shard_s_start_is_an_error(tmp_path):
    """A learner looks at tokens before it has verified a checksum."""
    with opened(tmp_path) as writer:
        writer.add(0, SAMPLES[:2], [(rows,) for rows in STATES[:2]])
        small.put(writer, SAMPLES[2])
    (path, _), counts = sorted((tmp_path / "shards").iterdir()), set()
    whole = path.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for place in range(header + 4 * 14):
        damaged = bytearray(whole)
        damaged[place] ^= 1 if place % 2 else 16
        path.write_bytes(damaged)
        os.utime(path, ns=(0, 0))
        stream = refreshed(tmp_path, 9)
        stream.prefetch([len(stream.samples) - 1])  # in another thread
        stream.states(list(range(len(stream.samples))))
        *others, last = contents(stream)
        assert last == SAMPLES[2] and all(sample.spans == () for sample in others)
        counts.add(len(others))
    assert counts == {0, 2}  # it is left out at once, or when its checksum is known


def test_a_tenth_is_held_out_by_its_answers(tmp_path):
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 9, (300, 12), generator=g).tolist()
    samples = [Sample.continuation(row, 4) for row in rows]
    samples += [Sample.continuation([8, 8, *row[4:]], 2) for row in rows]  # other prompts
    with opened(tmp_path) as writer:
        writer.add(0, samples, [(torch.zeros(len(s.tokens), 16).bfloat16(),) for s in samples])
    flags = refreshed(tmp_path, 9).held_out
    assert flags[:300].tolist() == flags[300:].tolist()
    assert 15 <= int(flags[:300].sum()) <= 50

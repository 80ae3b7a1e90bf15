"""A store read while its writers add and drop shards."""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch

from sglang_hyperdflash.tools.atomic import WriteFailed
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.samples import Sample
from sglang_hyperdflash.training.store import stream as stream_module
from sglang_hyperdflash.training.store import writer as store_writer
from sglang_hyperdflash.training.store.stream import StreamReader
from sglang_hyperdflash.training.store.writer import open_writer
from tests.unit.training.store.small import IDENTITY, KIND, SAMPLES, broken, found, residual

WORLD = ProcessGroup()


def opened(folder, name="one"):
    return open_writer(folder, IDENTITY, name, KIND, {})


def put(writer, *samples):
    for sample in samples:
        writer.add(writer.position, [sample], [(residual(sample),)])


def expected(*samples):
    return [(list(s.tokens), s.spans) for s in samples]


def test_it_follows_several_writers_oldest_first(tmp_path):
    with opened(tmp_path, "b") as b, opened(tmp_path, "a") as a:
        stream = StreamReader(tmp_path, 100, 9)
        assert found(stream) == []
        put(b, SAMPLES[0])
        put(a, SAMPLES[1])
        stream.refresh(WORLD)
        assert found(stream) == expected(*SAMPLES[:2]) and stream.written == 2
        put(b, SAMPLES[2])
        b.retain(0, 0.0)
        put(b, SAMPLES[3])
        stream.refresh(WORLD)
        assert found(stream) == expected(SAMPLES[1], SAMPLES[3]) and stream.written == 4
        states = stream.states([1, 0]).residual
        assert torch.equal(states[0, :7], residual(SAMPLES[3])) and not states[0, 7:].any()


@pytest.mark.parametrize("wrong", [-(10**18), 10**18])
def test_a_clock_that_was_wrong_does_not_change_what_is_newest(tmp_path, monkeypatch, wrong):
    """By thirty years, in one shard of the first writer; the second wrote before the last one."""
    off, plain = [0, wrong, 0, 0], store_writer.write_shard

    def write_shard(path, tensors):
        digest = plain(path, tensors)
        os.utime(path, ns=(0, path.stat().st_mtime_ns + off.pop(0)))
        return digest

    monkeypatch.setattr(store_writer, "write_shard", write_shard)
    with opened(tmp_path, "a") as a, opened(tmp_path, "b") as b:
        put(a, *SAMPLES[:2])
        put(b, SAMPLES[2])
        put(a, SAMPLES[3])
    stream = StreamReader(tmp_path, 100, 9)
    stream.refresh(WORLD)
    order = [SAMPLES.index(Sample(s.tokens.tolist(), s.spans)) for s in stream.samples]
    assert order[-1] == 3 and order.index(0) < order.index(1)


def test_a_refresh_reads_only_what_is_new(tmp_path, monkeypatch):
    with opened(tmp_path) as writer:
        put(writer, *SAMPLES[:3])
        stream = StreamReader(tmp_path, 100, 9)
        stream.refresh(WORLD)
        hashed = []
        plain = stream_module.held_out
        monkeypatch.setattr(
            stream_module, "held_out", lambda f, s, v: hashed.append(s.start) or plain(f, s, v)
        )
        manifest = tmp_path / "manifests" / "one.jsonl"
        size = manifest.stat().st_size
        with manifest.open("r+b") as file:  # what was read is not read again
            file.write(b"x" * 10)
        put(writer, SAMPLES[3])
        stream.refresh(WORLD)
        assert hashed == [3] and manifest.stat().st_size > size
        assert found(stream) == expected(*SAMPLES)


def test_a_shard_whose_line_was_not_flushed_keeps_its_place(tmp_path, monkeypatch):
    """Found by reading: the next one took its file, while readers held its line."""
    plain = os.fsync

    def full(number: int) -> None:
        if os.readlink(f"/proc/self/fd/{number}").endswith(".jsonl"):
            raise OSError(122, "Disk quota exceeded")
        plain(number)

    with opened(tmp_path) as writer:
        with monkeypatch.context() as patch, pytest.raises(WriteFailed):
            patch.setattr(os, "fsync", full)
            put(writer, SAMPLES[0])
        stream = StreamReader(tmp_path, 100, 9)
        for samples in (SAMPLES[:1], SAMPLES[:2]):
            stream.refresh(WORLD)
            assert found(stream) == expected(*samples)
            assert torch.equal(stream.states([0]).residual[0], residual(SAMPLES[0]))
            put(writer, SAMPLES[len(samples)])


def test_a_torn_line_is_read_when_it_is_whole(tmp_path):
    with opened(tmp_path) as writer:
        put(writer, *SAMPLES[:2])
    manifest = tmp_path / "manifests" / "one.jsonl"
    content = manifest.read_bytes()
    manifest.write_bytes(content[:-20])
    stream = StreamReader(tmp_path, 100, 9)
    stream.refresh(WORLD)
    assert found(stream) == expected(SAMPLES[0])
    manifest.write_bytes(content)
    stream.refresh(WORLD)
    assert found(stream) == expected(*SAMPLES[:2])


def test_a_sample_that_is_dropped_or_damaged_has_no_answers_and_zeros(tmp_path):
    with opened(tmp_path) as writer:
        put(writer, *SAMPLES)
        stream = StreamReader(tmp_path, 100, 9)
        stream.refresh(WORLD)
        stream.prefetch([0, 1])
        stream.states([0, 1])  # stays open, and so readable
        files = sorted((tmp_path / "shards").iterdir())
        for file in (files[0], files[3]):
            file.unlink()
        files[2].write_bytes(files[2].read_bytes()[:-1] + b"x")
        states = stream.states([0, 1, 2, 3]).residual
        assert [bool(rows.any()) for rows in states] == [True, True, False, False]
        assert [s.spans for s in stream.samples] == [s.spans for s in SAMPLES[:2]] + [(), ()]
        assert [len(s.tokens) for s in stream.samples] == [5, 9, 6, 7]
        assert stream.unreadable == {files[2].name, files[3].name}
        stream.refresh(WORLD)
        assert len(stream.samples) == 2 and os.listdir(tmp_path / "shards")
    other = StreamReader(tmp_path, 100, 9)
    other.refresh(WORLD)
    other.prefetch([1])  # fails in another thread
    other.states([1])
    assert other.samples[1].spans == () and not other.samples[1].tokens.any()


def test_no_flipped_byte_of_a_shard_s_start_is_an_error(tmp_path):
    """Found by reading: the learner looks at tokens before it has verified a checksum."""
    with opened(tmp_path) as writer:
        writer.add(0, SAMPLES[:2], [(residual(sample),) for sample in SAMPLES[:2]])
        put(writer, SAMPLES[2])
    (shard, _), counts = sorted((tmp_path / "shards").iterdir()), set()
    whole = shard.read_bytes()
    header = 8 + int.from_bytes(whole[:8], "little")
    for at, bit in product(range(header + 4 * 14), (1, 16)):
        damaged = bytearray(whole)
        damaged[at] ^= bit
        shard.write_bytes(damaged)
        stream = StreamReader(tmp_path, 100, 9)
        stream.refresh(WORLD)
        stream.states(list(range(len(stream.samples))))
        assert found(stream)[-1] == expected(SAMPLES[2])[0]
        assert all(spans == () for _, spans in found(stream)[:-1])
        counts.add(len(stream.samples))
    assert counts == {1, 3}  # it is left out at once, or when its checksum is known


def test_a_sample_that_is_not_finite_teaches_nothing(tmp_path, monkeypatch):
    """Otherwise the loss is not finite, and again after every restart."""
    monkeypatch.setattr(store_writer, "is_finite", lambda _: True)  # written before it was left out
    with opened(tmp_path) as writer:
        put(writer, SAMPLES[1])
        writer.add(writer.position, SAMPLES[:1], [(broken(SAMPLES[0]),)])
    stream = StreamReader(tmp_path, 100, 9)
    stream.refresh(WORLD)
    states = stream.states([0, 1]).residual
    assert [bool(each.any()) for each in states] == [True, False]
    assert [s.spans for s in stream.samples] == [SAMPLES[1].spans, ()]


@pytest.mark.parametrize("token", [-1, 9, 2**31 - 1])
def test_a_shard_with_a_token_outside_the_vocabulary_is_left_out(tmp_path, token):
    with opened(tmp_path) as writer:
        put(writer, SAMPLES[0], Sample([1, 2, token, 3], ((1, 4),)), SAMPLES[1])
    stream = StreamReader(tmp_path, 100, 9)
    for _ in range(2):
        stream.refresh(WORLD)
        assert found(stream) == expected(*SAMPLES[:2])
        assert len(stream.held_out) == 2 and stream.written == 3


def test_of_a_long_sample_the_last_tokens_are_read(tmp_path):
    with opened(tmp_path) as writer:
        put(writer, *SAMPLES)
    stream = StreamReader(tmp_path, 6, 9)
    stream.refresh(WORLD)
    cut = Sample(list(range(3, 9)), ((0, 0), (1, 6)))
    assert found(stream)[1] == expected(cut)[0]
    assert found(stream)[0] == expected(SAMPLES[0])[0]
    assert torch.equal(stream.states([1]).residual[0], residual(SAMPLES[1])[3:])


def test_a_tenth_is_held_out_by_its_answers(tmp_path):
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 9, (300, 12), generator=g).tolist()
    samples = [Sample.continuation(row, 4) for row in rows]
    samples += [Sample.continuation([8, 8, *row[4:]], 2) for row in rows]  # other prompts
    with opened(tmp_path) as writer:
        writer.add(0, samples, [(torch.zeros(len(s.tokens), 16).bfloat16(),) for s in samples])
    one, other = StreamReader(tmp_path, 100, 9), StreamReader(tmp_path, 5, 9)
    for stream in (one, other):
        stream.refresh(WORLD)
    assert one.held_out.tolist() == other.held_out.tolist()
    assert one.held_out[:300].tolist() == one.held_out[300:].tolist()
    assert 15 <= int(one.held_out[:300].sum()) <= 50

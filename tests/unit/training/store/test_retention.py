"""A stream stays within its budget: the newest shards, and a sample of all older ones."""

from __future__ import annotations

import hashlib

from sglang_hyperdflash.training.store.manifest import Shard
from sglang_hyperdflash.training.store.reader import StoreReader
from sglang_hyperdflash.training.store.retention import surplus
from sglang_hyperdflash.training.store.writer import open_writer
from tests.unit.training.store.small import IDENTITY, KIND, SAMPLES, found, residual


def shard(number: int) -> Shard:
    name = f"one-{number:08d}.safetensors"
    return Shard(name, hashlib.sha256(name.encode()).hexdigest(), 10, 0, "one", number, [1], [[]])


def test_the_newest_stay_and_a_uniform_sample_of_the_others():
    shards: list[Shard] = []
    for number in range(1000):
        shards.append(shard(number))
        gone = {each.start for each in surplus(shards, 1000, 0.5)}
        shards = [each for each in shards if each.start not in gone]
        assert sum(each.size for each in shards) <= 1000
    starts = [each.start for each in shards]
    assert starts[-50:] == list(range(950, 1000))
    old = starts[:-50]
    assert len(old) == 50
    # Of 950 older ones, about half are from the first half.
    assert 15 <= sum(start < 475 for start in old) <= 35


def test_without_a_reservoir_the_oldest_go_first():
    shards = [shard(number) for number in range(5)]
    assert [each.start for each in surplus(shards, 25, 0.0)] == [0, 1, 2]
    assert surplus(shards, 50, 0.0) == []


def test_a_stream_that_drops_shards_is_read_and_resumed(tmp_path):
    def stream():
        return open_writer(tmp_path, IDENTITY, "one", KIND, {})

    with stream() as writer:
        for sample in SAMPLES[:3]:
            writer.add(writer.position, [sample], [(residual(sample),)])
        assert found(StoreReader(tmp_path)) == [(s.tokens, s.spans) for s in SAMPLES[:3]]
        sizes = [path.stat().st_size for path in sorted((tmp_path / "shards").iterdir())]
        writer.retain(sum(sizes[1:]), 0.0)
    assert found(StoreReader(tmp_path)) == [(s.tokens, s.spans) for s in SAMPLES[1:3]]
    assert len(list((tmp_path / "shards").iterdir())) == 2
    left = tmp_path / "shards" / "one-00000000.safetensors"
    other = tmp_path / "shards" / "one-more-00000000.safetensors"
    for path in (left, other):  # what a kill left; what another writer wrote
        path.write_bytes(b"left")
    with stream() as writer:
        assert writer.position == 3
        writer.add(writer.position, SAMPLES[3:], [(residual(SAMPLES[3]),)])
        writer.retain(10**9, 0.0)
    assert not left.exists() and other.exists()
    assert found(StoreReader(tmp_path)) == [(s.tokens, s.spans) for s in SAMPLES[1:]]
    with stream() as writer:
        writer.retain(0, 0.5)
        assert writer.position == 4
    assert found(StoreReader(tmp_path)) == []

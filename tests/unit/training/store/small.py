"""A small store, as tests write and read it."""

import os
import resource
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import torch

from sglang_hyperdflash.training.samples import Sample
from sglang_hyperdflash.training.store.manifest import Data, Identity, data_digest
from sglang_hyperdflash.training.store.writer import StoreWriter, open_writer

M, D = 2, 8
IDENTITY = Identity("Target", "abc", "def", M, D, "bfloat16")
SAMPLES = [Sample(list(range(n)), ((2, 3), (4, n))) for n in (5, 9, 6, 7)]
SHARD_BYTES = 14 * (M * D * 2 + 4)  # two samples
DATA = Data(data_digest(SAMPLES), len(SAMPLES), SHARD_BYTES)
RANGES = [(0, 2), (2, 4)]
KIND = "hyperdflash capture"


@cache
def residual(length: int, width: int = M * D, seed: int = 0) -> torch.Tensor:
    """``[length, width]``, others for every length: rows of ``D`` that differ by up to 2^40, their
    numbers by up to 2^20, and a row of zeros.
    """
    g, shape = torch.Generator().manual_seed(length + 100 * seed), (length, width // D)
    rows = torch.randn(*shape, D, generator=g)
    rows *= torch.exp2(20.0 * torch.randn(*shape, 1, generator=g).clamp(-1, 1))
    rows *= torch.exp2(torch.randint(-10, 11, (*shape, D), generator=g).float())
    rows[0, 0] = 0
    return rows.flatten(1).bfloat16()


STATES = [residual(len(sample.tokens)) for sample in SAMPLES]


def broken(rows: torch.Tensor) -> torch.Tensor:
    """States with one number that is not finite."""
    rows = rows.clone()
    rows[1, 3] = torch.nan if len(rows) % 2 else -torch.inf
    return rows


def near(states: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Within half a step of e4m3 under each row's scale, and of bf16."""
    wanted, states = (x.float().unflatten(-1, (-1, D)) for x in (wanted, states))
    step = wanted.abs().amax(-1, keepdim=True) / 448 * 2**-9
    bound = torch.maximum(wanted.abs() / 16, step / 2) + wanted.abs() / 128
    return bool(((states - wanted).abs() <= bound).all())


@contextmanager
def files_of(size: int):
    """No file grows beyond so many bytes, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def opened(folder: Path, name: str = "one", identity: Identity = IDENTITY):
    return open_writer(folder, identity, name, KIND, {})


def put(writer: StoreWriter, *samples: Sample) -> None:
    """To a stream, a shard for each sample."""
    for sample in samples:
        writer.add(writer.position, [sample], [(residual(len(sample.tokens)),)])


def add(writer: StoreWriter, ranges=RANGES) -> None:
    """Shards of the data set :data:`SAMPLES`."""
    writer.begin(DATA)
    for start, end in ranges:
        writer.add(start, SAMPLES[start:end], [(rows,) for rows in STATES[start:end]])


def write(folder: Path, ranges=RANGES, name: str = "one") -> None:
    with opened(folder, name) as writer:
        add(writer, ranges)


def content(sample) -> Sample:
    """A stored sample's tokens and spans."""
    return Sample(sample.tokens.tolist(), sample.spans)


def contents(source) -> list[Sample]:
    return list(map(content, source.samples))


def flip(path: Path, place: int = -3, bit: int = 1) -> None:
    """Another file with another bit, whose time differs; who has the old one open keeps it."""
    data, before = bytearray(path.read_bytes()), path.stat()
    data[place] ^= bit
    other = path.with_suffix(".flipped")
    other.write_bytes(data)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns + 10**9))
    other.replace(path)

"""A small store, as tests write and read it."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import torch

from sglang_hyperdflash.training.samples import Sample
from sglang_hyperdflash.training.store.manifest import Data, Identity, data_digest
from sglang_hyperdflash.training.store.writer import StoreWriter, open_writer, shard_ranges

M, D = 2, 8
IDENTITY = Identity("Target", "abc", "def", M, D, "bfloat16")
SAMPLES = [Sample(list(range(n)), ((2, 3), (4, n))) for n in (5, 9, 6, 7)]
SHARD_BYTES = 14 * (M * D * 2 + 4)  # two samples
DATA = Data(data_digest(SAMPLES), len(SAMPLES), SHARD_BYTES)
RANGES = [(0, 2), (2, 4)]
KIND = "hyperdflash capture"


def residual(sample: Sample) -> torch.Tensor:
    """``[S, m*d]``, another one for every length."""
    g = torch.Generator().manual_seed(len(sample.tokens))
    return torch.randn(len(sample.tokens), M * D, generator=g).bfloat16()


def add(writer: StoreWriter, ranges=RANGES) -> None:
    """Add shards of :data:`SAMPLES`."""
    assert shard_ranges(SAMPLES, IDENTITY, SHARD_BYTES) == RANGES
    writer.begin(DATA)
    for start, end in ranges:
        chosen = SAMPLES[start:end]
        writer.add(start, chosen, [(residual(sample),) for sample in chosen])


def broken(sample: Sample) -> torch.Tensor:
    """Its states with one number that is not finite."""
    rows = residual(sample)
    rows[1, 3] = torch.nan if len(sample.tokens) % 2 else -torch.inf
    return rows


def write(folder: Path, ranges=RANGES, name: str = "one") -> None:
    """One writer's whole run."""
    with ExitStack() as held:
        add(held.enter_context(open_writer(folder, IDENTITY, name, KIND, {})), ranges)


def found(source) -> list[tuple[list[int], tuple]]:
    """Tokens and spans of all samples."""
    return [(sample.tokens.tolist(), sample.spans) for sample in source.samples]


EXPECTED = [(sample.tokens, sample.spans) for sample in SAMPLES]

"""Adding shards to a store: one writer, its manifest and its part of a data set."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.jsonl import ResumableWriter
from sglang_hyperdflash.tools.ownership import InUse, claim
from sglang_hyperdflash.training.samples import Sample
from sglang_hyperdflash.training.store.manifest import (
    KIND,
    MANIFESTS,
    SHARDS,
    USED,
    VERIFIED,
    Data,
    Identity,
    Manifest,
    Shard,
    data_sets,
    manifests,
    settings_of,
    shard_files,
)
from sglang_hyperdflash.training.store.retention import surplus
from sglang_hyperdflash.training.store.shard import FP8, SCALE, is_finite, to_fp8, write_shard

Range = tuple[int, int]


def bytes_of(sample: Sample, identity: Identity) -> int:
    """Disk bytes of one sample."""
    d, dtype = identity.hidden_size, getattr(torch, identity.dtype)
    row = d * FP8.itemsize + 4 if identity.fp8 else d * dtype.itemsize
    return len(sample.tokens) * ((identity.hc_mult + len(identity.layer_ids)) * row + 4)


def shard_ranges(samples: Sequence[Sample], identity: Identity, limit: int) -> list[Range]:
    """Consecutive ranges ``[start, end)`` of samples of up to ``limit`` bytes, one at least."""
    ranges, start, size = [], 0, 0
    for i, sample in enumerate(samples):
        more = bytes_of(sample, identity)
        if i > start and size + more > limit:
            ranges.append((start, i))
            start, size = i, 0
        size += more
    return [*ranges, (start, len(samples))] if samples else []


class StoreWriter:
    """Adds shards; made by :func:`open_writer`.

    Threads may add at once, but not while one retains.
    """

    def __init__(
        self, folder: Path, identity: Identity, name: str, lines: ResumableWriter, own: Manifest
    ) -> None:
        self.folder, self.identity, self.name, self._lines = folder, identity, name, lines
        self._own = own
        self._adding = threading.Lock()
        self._added: set[str] = set()

    @cached_property
    def damaged(self) -> list[str]:
        """Names of its shards that are missing or are not as they were written.

        Every shard whose time has changed is hashed: a server's start must not wait for that.
        """
        shards = self._own.shards.values()
        return [shard.file for shard in shards if not shard.intact(self.folder)]

    def begin(self, data: Data) -> None:
        """Say which data set this writer adds a part of, before its first shard.

        Without this it writes a stream without an end.

        Raises:
            HyperDFlashConfigError: it began another one, or another writer cuts this one otherwise.
        """
        for path, known in data_sets(self.folder).items():
            same = path == self._own.path
            if known not in (None, data) and (same or known.digest == data.digest):
                now = vars(data).items()
                changed = [
                    f"{k} was {vars(known)[k]}, now {v}" for k, v in now if vars(known)[k] != v
                ]
                raise HyperDFlashConfigError(
                    f"{path} is of another data set, or of the same one cut otherwise: "
                    f"{'; '.join(changed)}. Repeat with the data and the options of before, or "
                    "give another store."
                )
        if self._own.data is None:
            self._lines.append({"data": vars(data)})
            self._own.data = data
        self._sweep()

    def missing(self, ranges: Sequence[Range]) -> list[Range]:
        """The ranges of its data set that no writer has added, its own damaged ones included."""
        digest, done = self._own.data.digest, set()
        whole = shard_files(self.folder).difference(self.damaged)
        for found in manifests(self.folder):
            there = [shard for shard in found.shards.values() if shard.file in whole]
            done |= {(s.start, s.end) for s in (*there, *found.used) if s.data == digest}
        return [each for each in ranges if each not in done]

    def add(
        self, start: int, samples: Sequence[Sample], states: Sequence[Sequence[torch.Tensor]]
    ) -> None:
        """Write one shard, and then its line; samples with states that are not finite are left out.

        Args:
            start: the first sample's position in the data set. states: of every sample, residual
                ``[S, m*d]`` and, where the store has layers, ``[S, n*d]``.

        Raises:
            WriteFailed: the disk is full; earlier shards are whole, nothing half-written stays.
        """
        file, dtype = f"{self.name}-{start:08d}.safetensors", getattr(torch, self.identity.dtype)
        samples, states = list(samples), [[x.to("cpu", dtype) for x in parts] for parts in states]
        for i, parts in enumerate(states):
            if not all(map(is_finite, parts)):
                samples[i], states[i] = Sample([], ()), [x[:0] for x in parts]
        tensors = {"tokens": [torch.as_tensor(s.tokens, dtype=torch.int32) for s in samples]}
        for name, parts in zip(("residual", "layers"), zip(*states, strict=True), strict=False):
            if parts[0].shape[-1]:
                shape = (-1, self.identity.hidden_size)
                rows = [each.unflatten(-1, shape) for each in parts]
                if self.identity.fp8:
                    rows, tensors[name + SCALE] = zip(*map(to_fp8, rows), strict=True)
                tensors[name] = rows
        path = self.folder / SHARDS / file
        digest = write_shard(path, tensors)
        found = path.stat()
        shard = Shard(
            file=file,
            sha256=digest,
            size=found.st_size,
            modified=found.st_mtime_ns,
            data=self._own.data.digest if self._own.data else self.name,
            start=start,
            lengths=[len(sample.tokens) for sample in samples],
            spans=[sample.spans for sample in samples],
        )
        with self._adding:
            self._lines.append({"shard": vars(shard)})
            self._added.add(file)
            self._own.add(shard)  # readers see the line now: its place is taken even if this fails:
            self._lines.flush()  # other nodes see whole lines, one after another

    @property
    def left_out(self) -> list[int]:
        """Positions of samples in the data set whose states were not finite."""
        shards = (*self._own.shards.values(), *self._own.used)
        return sorted(s.start + i for s in shards for i, n in enumerate(s.lengths) if not n)

    @property
    def position(self) -> int:
        """Where a stream goes on: one past its last sample."""
        return self._own.end

    def retain(self, budget: int, reservoir: float) -> None:
        """Remove shards of a stream beyond a budget of bytes (:func:`~.retention.surplus`).

        A reader that was opened before misses them: it is told which shard, and reopened.

        Args:
            reservoir: share of the budget for a sample of all older shards, 0 to 1.

        Raises:
            WriteFailed: the manifest cannot be written.
        """
        shards = [self._own.shards[start] for start in sorted(self._own.shards)]
        self._drop(surplus(shards, budget, reservoir))
        self._sweep()

    def _sweep(self) -> None:
        """Remove what a kill left over."""
        kept = {shard.file for shard in self._own.shards.values()}
        for file in shard_files(self.folder) - kept:
            if file.rpartition("-")[0] == self.name:
                self._unlink(file)

    def make_room(self, size: int, budget: int) -> bool:
        """Remove the shards that the training has used; return whether ``size`` more bytes fit.

        Raises:
            WriteFailed: the manifest cannot be written.
        """
        with self._adding:
            with suppress(FileNotFoundError):
                used = json.loads((self.folder / USED).read_bytes())[self._own.data.digest]
                shards = list(self._own.shards.values())
                self._drop([shard for shard in shards if shard.end <= used])
            return self.size + size <= budget

    @property
    def size(self) -> int:
        """Bytes of its shards, but for those that are to be written again."""
        again = set(self.damaged) - self._added
        return sum(s.size for s in self._own.shards.values() if s.file not in again)

    def _drop(self, shards: Sequence[Shard]) -> None:
        for shard in shards:
            self._lines.append({"dropped": shard.start})
            self._own.drop(shard.start)
        if shards:
            self._lines.flush()  # before the files are gone
        for shard in shards:
            self._unlink(shard.file)

    def _unlink(self, file: str) -> None:
        (self.folder / SHARDS / file).unlink(missing_ok=True)
        (self.folder / VERIFIED / file).unlink(missing_ok=True)


@contextmanager
def open_writer(
    folder: Path, identity: Identity, name: str, kind: str, settings: Mapping[str, Any]
) -> Iterator[StoreWriter]:
    """Hold one writer of a store, which is made where there is none.

    Args:
        name: of the writer: of its manifest and its shards.
        kind, settings: of the command, as :func:`~sglang_hyperdflash.tools.ownership.claim` takes
            them: what must not change when it resumes.

    Raises:
        NotOurs: the folder holds something else or states of another target, or the writer began
            with other settings. InUse: the same writer runs. WriteFailed: it cannot be written.
    """
    _claim_store(folder, identity)
    path = folder / MANIFESTS / f"{name}.jsonl"
    records: list[dict[str, Any]] = []
    with claim(path, kind, settings, is_file=True), ResumableWriter(path, records.append) as lines:
        yield StoreWriter(folder, identity, name, lines, Manifest(records, path))


def _claim_store(folder: Path, identity: Identity) -> None:
    """Make the folder a store of this identity, or check that it is one."""
    for attempt in range(100):
        try:
            with claim(folder, KIND, settings_of(identity)):
                return
        except InUse:  # another writer is just doing this
            if attempt == 99:
                raise
            time.sleep(0.1)

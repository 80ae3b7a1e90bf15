"""What a store's manifests say: whose states it holds, and the samples of every shard."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from sglang_hyperdflash.tools.checksum import bytes_hash, file_hash, short_hash
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.jsonl import parse
from sglang_hyperdflash.tools.ownership import MANIFEST
from sglang_hyperdflash.training.rows import HUB, files_of, hub_identity
from sglang_hyperdflash.training.samples import Sample

KIND = "hyperdflash store"
MANIFESTS, SHARDS, VERIFIED = "manifests", "shards", "verified"
# Of a store with a budget: the one run that trains on it, and how far it has used the data set: by
# digest, one past the last sample that it needs no more.
READER, USED = "reader", "used.json"
REPEAT = "Run the same command again that wrote it: only this shard is repeated."


@dataclass(frozen=True)
class Identity:
    """Whose states a store holds; it never mixes two targets, dtypes or choices of layers.

    Attributes:
        hc_head_fingerprint: None for a target without ``hc_head``, which its norm identifies.
        layer_ids: layers whose paths' means are stored next to the residual.
        dtype: of the states as they were computed, ``bfloat16``.
        fp8: whether they are stored as float8_e4m3fn with a scale for each token and path, which a
            reader turns into bf16.
    """

    target_architecture: str
    hc_head_fingerprint: str | None
    norm_fingerprint: str
    hc_mult: int
    hidden_size: int
    dtype: str
    layer_ids: tuple[int, ...] = ()
    fp8: bool = False

    @property
    def read_dtype(self) -> torch.dtype:
        """Of the states that a reader gives."""
        return torch.bfloat16 if self.fp8 else getattr(torch, self.dtype)


@dataclass(frozen=True)
class Data:
    """A finite data set that one or more writers put into a store, each a part of its shards.

    Attributes:
        digest: of tokens and spans. samples: their number. shard_bytes: what a shard holds at most:
            writers of one data set cut it into the same shards.
        budget: bytes of it that a store holds at most, while a training uses it; None for all.
        window: tokens before a sample's first answer that it holds at most; None for all.
    """

    digest: str
    samples: int
    shard_bytes: int
    budget: int | None = None
    window: int | None = None


@dataclass(frozen=True)
class Shard:
    """A manifest's line.

    Attributes:
        file: its name in ``shards``. sha256, size, modified: of the file; its time in ns.
        data: digest of its data set. start: its first sample's position in that.
        lengths: tokens of each sample, 0 for one whose states were not finite. spans: of each.
    """

    file: str
    sha256: str
    size: int
    modified: int
    data: str
    start: int
    lengths: list[int]
    spans: list[list[Sequence[int]]]

    @property
    def end(self) -> int:
        """One past its last sample's position."""
        return self.start + len(self.lengths)

    @property
    def kept(self) -> list[tuple[int, list[Sequence[int]]]]:
        """Length in tokens, and spans, of every sample with finite states."""
        return [one for one in zip(self.lengths, self.spans, strict=True) if one[0]]

    def untouched(self, folder: Path) -> bool:
        """Whether the file has the size and time that it was written with."""
        return as_written(folder / SHARDS / self.file, self.size, self.modified)

    def intact(self, folder: Path) -> bool:
        """Whether the file is as it was written; hashed only where size or time differ."""
        path = folder / SHARDS / self.file
        return self.untouched(folder) or (path.is_file() and file_hash(path) == self.sha256)


def as_written(path: Path, size: int, modified: int) -> bool:
    """Whether a file has a size and a time in ns, within a second: file systems round times."""
    try:
        status = path.stat()
    except OSError:
        return False
    return status.st_size == size and abs(status.st_mtime_ns - modified) < 10**9


class Manifest:
    """One writer's lines so far; a last line that is not whole yet is left out.

    Attributes:
        data: what it writes, or None for an endless stream. shards: by start; a repeated shard's
            last line counts. What its writer has removed is not among them. end: one past the last
            sample that was ever in them. used: of a data set, the shards that were removed.
    """

    def __init__(self, records: list[dict[str, Any]], path: Path) -> None:
        self.path = path
        self.data: Data | None = None
        self.shards: dict[int, Shard] = {}
        self.used: list[Shard] = []
        self.end = 0
        self._bytes = self._lines = 0
        self._extend(records)

    def _extend(self, records: list[dict[str, Any]]) -> None:
        try:
            for record in records:
                self._add(record)
        except (KeyError, TypeError) as error:
            raise HyperDFlashConfigError(
                f"{self.path}: expected the manifest of a store's writer, found a line without "
                f"{error}. Remove {self.path} and run the same command again."
            ) from error

    def _add(self, record: dict[str, Any]) -> None:
        if "data" in record:
            self.data = Data(**record["data"])
        elif "dropped" in record:
            self.drop(record["dropped"])
        else:
            self.add(Shard(**record["shard"]))

    def add(self, shard: Shard) -> None:
        """Take in a shard's line."""
        self.shards[shard.start] = shard
        self.end = max(self.end, shard.end)

    def drop(self, start: int) -> None:
        """Take a shard out."""
        shard = self.shards.pop(start)
        if self.data is not None:
            self.used.append(replace(shard, spans=[]))  # no one reads these again

    @classmethod
    def read(cls, path: Path) -> Manifest:
        """Of a file that its writer may be appending to."""
        manifest = cls([], path)
        manifest.read_on()
        return manifest

    def read_on(self) -> None:
        """Take in the lines that were appended since it was read."""
        with self.path.open("rb") as file:
            file.seek(self._bytes)
            *lines, _torn = file.read().split(b"\n")
        first = self._lines + 1
        self._extend([parse(line, f"{self.path}:{n}") for n, line in enumerate(lines, first)])
        self._bytes += sum(map(len, lines)) + len(lines)
        self._lines += len(lines)


def manifests(folder: Path) -> list[Manifest]:
    """Of all writers, by name."""
    return [Manifest.read(path) for path in sorted((folder / MANIFESTS).glob("*.jsonl"))]


def shard_files(folder: Path) -> set[str]:
    """Names of the shards that are there: one listing, where thousands of stats would take long."""
    with suppress(FileNotFoundError):
        return set(os.listdir(folder / SHARDS))
    return set()


def read_identity(folder: Path) -> Identity:
    """Whose states a store holds.

    Raises:
        FileNotFoundError: there is no store. HyperDFlashConfigError: it is of another version.
    """
    try:
        found = json.loads((folder / MANIFEST).read_bytes())
    except (OSError, ValueError):
        found = {}
    if found.get("kind") != KIND:
        raise FileNotFoundError(
            f"{folder} is no store: expected the output of `hyperdflash capture`."
        )
    try:
        settings = found["settings"]
        return Identity(**settings | {"layer_ids": tuple(settings["layer_ids"])})
    except (KeyError, TypeError) as error:
        raise HyperDFlashConfigError(
            f"{folder / MANIFEST} is damaged or of another version ({error}). Run `hyperdflash "
            "capture` into a new folder."
        ) from error


def settings_of(identity: Identity) -> dict[str, Any]:
    """The identity as the settings of an owned folder."""
    return asdict(identity)


def read_shards(folder: Path) -> list[Shard]:
    """Every shard of a store once, by data set and position.

    A shard that two writers wrote counts once.

    Raises:
        HyperDFlashConfigError: a shard is missing, a data set is not whole, or a line is damaged.
    """
    found: dict[tuple[str, int], Shard] = {}
    wanted: dict[str, tuple[int, Path]] = {}
    there = shard_files(folder)
    for manifest in manifests(folder):
        if manifest.data is not None:
            wanted[manifest.data.digest] = manifest.data.samples, manifest.path
        for shard in manifest.shards.values():
            known = found.get((shard.data, shard.start))
            if known is None or known.file not in there:
                found[shard.data, shard.start] = shard
    shards = [found[key] for key in sorted(found)]
    for shard in shards:
        path = folder / SHARDS / shard.file
        # The listing may be older than the line, most of all that of a network file system.
        if shard.file not in there and not path.is_file():
            raise HyperDFlashConfigError(f"shard {path} is missing. {REPEAT}")
    for digest, (samples, path) in wanted.items():
        _check_whole([shard for shard in shards if shard.data == digest], samples, path)
    return shards


def data_sets(folder: Path) -> dict[Path, Data | None]:
    """What each writer that has begun writes, by its manifest; None for an endless stream."""
    every: dict[Path, Data | None] = {}
    for path in sorted((folder / MANIFESTS).glob("*.jsonl")):
        with path.open("rb") as file:
            line = file.readline()
        if line.endswith(b"\n"):
            data = parse(line, f"{path}:1").get("data")
            every[path] = None if data is None else Data(**data)
    return every


def budgeted(folder: Path) -> Data | None:
    """The data set of a store that holds a part of it at a time, for one training; else None.

    Raises:
        HyperDFlashConfigError: it holds other samples, too.
    """
    every = set(data_sets(folder).values())
    limited = [data for data in every if data is not None and data.budget]
    if limited and len(every) > 1:
        raise HyperDFlashConfigError(
            f"{folder} was captured with --budget, for one training on one data set; found "
            f"{len(every)} data sets in it. Capture each into a store of its own."
        )
    return limited[0] if limited else None


def _check_whole(shards: Sequence[Shard], samples: int, path: Path) -> None:
    """Raise ``HyperDFlashConfigError`` unless a data set's shards, by position, leave no gap.

    Args:
        samples: of the data set. path: a manifest of one of its writers.
    """
    at = 0
    for shard in shards:
        if shard.start != at:
            break
        at = shard.end
    if at != samples:
        held = len({i for shard in shards for i in range(shard.start, shard.end)})
        raise HyperDFlashConfigError(
            f"{path.parent.parent} holds {held} of {samples} samples, not all of the data to be "
            "captured. Run the same `hyperdflash capture` again to finish it, with every --share "
            f"of it, or remove {path} to leave that data out."
        )


def data_digest(samples: Sequence[Sample]) -> str:
    """A short hash of tokens and spans, in order."""
    return bytes_hash(json.dumps([list(s.tokens), s.spans]).encode() for s in samples)


def content_hash(place: str | Path) -> str:
    """16 hex digits that stand for the bytes of a file, or of a folder's, or for a store's samples;
    a hub name with its commit.

    Raises:
        FileNotFoundError: nothing is there.
    """
    if str(place).startswith(HUB):
        return hub_identity(str(place))
    path = Path(place)
    if (path / MANIFEST).is_file():
        identity, data = read_identity(path), budgeted(path)
        if data is not None:  # its shards come and go
            return short_hash([settings_of(identity), vars(data)])
        # Not of the states' bytes: a shard that was captured again may differ in their last bits.
        lines = [[shard.data, shard.start, shard.lengths] for shard in read_shards(path)]
        return short_hash([settings_of(identity), lines])
    hashes = [file_hash(file)[:16] for file in files_of(path)]
    return hashes[0] if path.is_file() else short_hash(hashes)

"""Reading a store whose writers add and drop shards meanwhile."""

from __future__ import annotations

from itertools import accumulate, chain
from pathlib import Path
from zlib import crc32

import torch

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.process_group import ProcessGroup
from sglang_hyperdflash.training.samples import States
from sglang_hyperdflash.training.store.manifest import (
    MANIFESTS,
    SHARDS,
    Data,
    Manifest,
    Shard,
    shard_files,
)
from sglang_hyperdflash.training.store.reader import StoreReader
from sglang_hyperdflash.training.store.shard import OpenShard

# One sample of so many is held out.
HELD_OUT = 10
GONE = (HyperDFlashConfigError, OSError, ValueError)


class Growing(StoreReader):
    """A :class:`StoreReader` that shows other shards from time to time; then indices change."""

    def __init__(self, folder: str | Path, window: int | None = None) -> None:
        self._manifests: dict[Path, Manifest] = {}
        super().__init__(folder, [], window)

    def _read_on(self) -> list[Manifest]:
        """The manifests of the store as they are now."""
        for path in (self.folder / MANIFESTS).glob("*.jsonl"):
            self._manifests.setdefault(path, Manifest([], path)).read_on()
        return list(self._manifests.values())

    def _show(self, shards: list[Shard]) -> None:
        for _, reads in self._begun.values():
            for read in reads:  # by the indices of before
                read.result()
        self._begun.clear()
        self._index({self.folder: shards})
        for path in self._open.keys() - {path for path, *_ in self._shards}:
            del self._open[path]  # would keep its bytes on the disk


class PortionReader(Growing):
    """A data set of which the store holds a portion of consecutive shards at a time.

    Args:
        window: of the drafter, as of a :class:`StoreReader`.

    Attributes:
        data: the data set.
    """

    def __init__(self, folder: str | Path, data: Data, window: int | None) -> None:
        self.data = data
        super().__init__(folder, window)
        self.counts = [data.samples]

    def show(self, start: int, world: ProcessGroup) -> int | None:
        """Show the portion that begins at a position of the data set, to all processes.

        It fills half of the budget, so that the next one can be captured meanwhile.

        Returns:
            Its end; None as long as shards of it are missing.

        Raises:
            HyperDFlashConfigError: its shards were used and removed.
        """
        shards = world.on_main(lambda: self._portion(start))
        if shards is None:
            return None
        self._show(shards)
        return shards[-1].end

    def _portion(self, start: int) -> list[Shard] | None:
        every = self._read_on()
        there = {s.start: s for each in every for s in each.shards.values()}
        chosen, end, room = [], start, self.data.budget // 2
        usable = False
        while end < self.data.samples and (not usable or room >= self.data.shard_bytes):
            if end not in there:
                if any(s.start == end for each in every for s in each.used):
                    raise HyperDFlashConfigError(
                        f"{self.folder} no longer holds sample {end} and those after it: a "
                        "training has used them. Begin a new store and a new --work."
                    )
                return None
            chosen.append(there[end])
            usable = usable or bool(there[end].kept)
            end, room = there[end].end, room - there[end].size
        if not usable:
            raise HyperDFlashConfigError(
                f"{self.folder}: no sample from {start} on has finite states. Check the target's "
                "weights."
            )
        return chosen


class StreamReader(Growing):
    """A store that :meth:`refresh` brings up to date; samples are oldest first.

    Those of one writer are in its order, whatever its clock said; the clock orders writers.

    Of a longer sample the last ``max_length`` tokens are read. A sample whose shard has been
    dropped or is damaged has no answers and states of zeros: it teaches nothing. A shard with a
    token that the target does not have is left out.

    Args:
        vocabulary: tokens of the target. window: of the drafter.

    Attributes:
        held_out: ``[samples]`` bool, never to be trained on: a tenth, by a hash of the answers. It
            is the same after a restart, and equal answers are on the same side.
        written: samples that the writers have ever added.

    Raises:
        FileNotFoundError: there is no store.
    """

    def __init__(
        self, folder: str | Path, max_length: int, vocabulary: int, window: int | None = None
    ) -> None:
        self.max_length, self.vocabulary, self.written = max_length, vocabulary, 0
        self.held_out = torch.zeros(0, dtype=torch.bool)
        self.unreadable: set[Path] = set()  # shards
        self._flags: dict[str, list[bool]] = {}
        super().__init__(folder, window)

    def refresh(self, world: ProcessGroup) -> None:
        """Show the store as it is now, the same to all processes; indices change."""
        shards, flags, self.written = world.on_main(self._listing)
        self._show(shards)
        self.held_out = torch.tensor(flags, dtype=torch.bool)
        self.unreadable.clear()  # a shard may have been unreadable for a while

    def _listing(self) -> tuple[list[Shard], list[bool], int]:
        found: dict[tuple[str, int], tuple[int, Shard]] = {}
        for manifest in self._read_on():
            shards = [manifest.shards[start] for start in sorted(manifest.shards, reverse=True)]
            # A clock that was ahead for a while would make what was written then newest for long.
            times = accumulate((shard.modified for shard in shards), min)
            found |= {(s.data, s.start): (t, s) for t, s in zip(times, shards, strict=True)}
        there, flags = shard_files(self.folder), {}
        for _, shard in sorted(found.values(), key=lambda each: (each[0], each[1].start)):
            if shard.file in there:
                known = self._flags.get(shard.file)
                known = known or held_out(self.folder, shard, self.vocabulary)
                if known:
                    flags[shard.file] = known
        self._flags = flags
        shards = {shard.file: shard for _, shard in found.values()}
        written = sum(manifest.end for manifest in self._manifests.values())
        return [shards[file] for file in flags], list(chain(*flags.values())), written

    def _unseen(self) -> torch.Tensor:
        return torch.maximum(super()._unseen(), self.lengths - self.max_length)

    def tokens(self, index: int) -> torch.Tensor:
        """``[S]`` int32 of a sample; zeros where it is gone."""
        try:
            return super().tokens(index)
        except GONE:
            self._lose(index)
            return torch.zeros(int(self.lengths[index]), dtype=torch.int32)

    def spans(self, index: int) -> tuple[tuple[int, int], ...]:
        """The answers' spans of a sample; none where it is gone."""
        gone = self._shards[self.place(index)[0]][0] in self.unreadable
        return () if gone else super().spans(index)

    def _fill(self, states: States, row: int, index: int) -> None:
        try:
            super()._fill(states, row, index)
        except GONE:
            self._lose(index)
            states.residual[row], states.layers[row] = 0, 0

    def _lose(self, index: int) -> None:
        self.unreadable.add(self._shards[self.place(index)[0]][0])


def held_out(folder: Path, shard: Shard, vocabulary: int) -> list[bool]:
    """Which samples of a shard are held out; empty where it cannot be read or used."""
    try:
        tokens = OpenShard(folder / SHARDS / shard.file).tokens
    except GONE:
        return []
    # An embedding would fail at these, on a GPU for all that follows.
    if ((tokens < 0) | (tokens >= vocabulary)).any():
        return []
    flags, at = [], 0
    for length, spans in shard.kept:
        answers = (tokens[at + start : at + end].numpy().tobytes() for start, end in spans)
        flags.append(crc32(b"".join(answers)) % HELD_OUT == 0)
        at += length
    return flags

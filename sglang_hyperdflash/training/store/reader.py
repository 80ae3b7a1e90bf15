"""Reading a store: a trainer's source whose samples and states stay on disk until they are used."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from itertools import chain
from pathlib import Path

import torch

from sglang_hyperdflash.tools.atomic import WriteFailed, write_text
from sglang_hyperdflash.tools.checksum import file_hash
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.samples import States
from sglang_hyperdflash.training.store.manifest import (
    REPEAT,
    SHARDS,
    VERIFIED,
    Shard,
    as_written,
    read_identity,
    read_shards,
)
from sglang_hyperdflash.training.store.shard import OpenShard

THREADS = 8
# Of states that are read ahead, in pinned memory of every process.
PREFETCH_BYTES = 2 << 30
OPEN_SHARDS = 256


class StoredSample:
    """As :class:`~sglang_hyperdflash.training.samples.Sample`; its tokens are mapped on demand."""

    __slots__ = ("_index", "_reader")

    def __init__(self, reader: StoreReader, index: int) -> None:
        self._reader, self._index = reader, index

    @property
    def tokens(self) -> torch.Tensor:
        """``[S]`` int32."""
        return self._reader.tokens(self._index)

    @property
    def spans(self) -> tuple[tuple[int, int], ...]:
        return self._reader.spans(self._index)

    @property
    def answer_tokens(self) -> int:
        """Tokens inside the spans."""
        return sum(end - start for start, end in self.spans)


class StoredSamples(Sequence):
    """The samples of a store."""

    def __init__(self, reader: StoreReader) -> None:
        self._reader = reader

    def __len__(self) -> int:
        return len(self._reader.lengths)

    def __getitem__(self, index: int) -> StoredSample:
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return StoredSample(self._reader, index % len(self))


class StoreReader:
    """A :class:`~sglang_hyperdflash.training.samples.Source` over stores as they are now.

    A process keeps some 50 bytes a sample in memory. A shard that is not as it was written, such as
    a copied one, is verified when it is first opened; a stamp tells other readers.

    Of a sample the tokens are left out that no block sees: RoPE turns queries and keys by their
    distance, so a drafter does not notice where a sample begins.

    Args:
        folder: of the store, or of several of one target.
        shards: what to read of the first one; by default all of all.
        window: of the drafter: tokens that a block sees before its anchor; None for all.

    Attributes:
        lengths, answers: tokens of every sample, and those that are answers, int64.
        counts: samples of every store; they come in the order of the stores.

    Raises:
        FileNotFoundError: there is no store. HyperDFlashConfigError: it is not whole, or a shard is
            missing; when it is used: a shard is corrupt.
    """

    def __init__(
        self,
        folder: str | Path | Sequence[str | Path],
        shards: list[Shard] | None = None,
        window: int | None = None,
    ) -> None:
        folders = [folder] if isinstance(folder, str | Path) else folder
        self.folder, *others = map(Path, folders)
        self.window, self.identity = window, read_identity(self.folder)
        for other in others:
            if read_identity(other) != self.identity:
                raise HyperDFlashConfigError(
                    f"{other} and {self.folder} hold states of two targets, dtypes or choices of "
                    "layers, which no training mixes."
                )
        self._index(
            {each: read_shards(each) for each in (self.folder, *others)}
            if shards is None
            else {self.folder: shards}
        )
        self.samples = StoredSamples(self)
        self._open: OrderedDict[Path, OpenShard] = OrderedDict()
        self._opening = threading.Lock()
        self._pool = ThreadPoolExecutor(THREADS, "store")
        self._begun: dict[tuple[int, ...], tuple[States, list[Future]]] = {}

    def _index(self, stores: Mapping[Path, list[Shard]]) -> None:
        # The lists of a million samples' spans would be a GB in every process.
        self._shards = [
            (f / SHARDS / s.file, s.sha256, (s.size, s.modified)) for f in stores for s in stores[f]
        ]
        shards = list(chain.from_iterable(stores.values()))
        self.counts = [sum(len(s.kept) for s in each) for each in stores.values()]
        flat, kept = chain.from_iterable, [s.kept for s in shards]
        counts = torch.tensor([len(samples) for samples in kept], dtype=torch.int64)
        self.lengths = torch.tensor([n for n, _ in flat(kept)], dtype=torch.int64)
        self._shard_of = torch.repeat_interleave(torch.arange(len(shards)), counts)
        before = self.lengths.cumsum(0) - self.lengths
        firsts = (counts.cumsum(0) - counts)[self._shard_of]
        self._row = before - before[firsts]
        spans = [spans for _, spans in flat(kept)]
        self._span_at = torch.tensor([0, *map(len, spans)]).cumsum(0)
        self._spans = torch.tensor(list(flat(spans)), dtype=torch.int32).view(-1, 2)
        cut, counts = self._unseen(), self._span_at.diff()
        self.lengths, self._row = self.lengths - cut, self._row + cut
        self._spans -= torch.repeat_interleave(cut, counts).int().unsqueeze(1)
        self._spans.clamp_(min=0)
        sizes = torch.cat([torch.zeros(1).long(), self._spans.diff().flatten().long().cumsum(0)])
        self.answers = sizes[self._span_at].diff()

    def _unseen(self) -> torch.Tensor:
        """Of every sample, how many tokens at its start no block sees, int64."""
        if self.window is None:
            return torch.zeros_like(self.lengths)
        with_answer = self._span_at.diff() > 0
        first = self.lengths.clone()
        first[with_answer] = self._spans[self._span_at[:-1][with_answer], 0].long()
        return (first - self.window).clamp(min=0)

    def tokens(self, index: int) -> torch.Tensor:
        """``[S]`` int32 of a sample."""
        shard, rows = self.place(index)
        return self.opened(shard).tokens[rows]

    def spans(self, index: int) -> tuple[tuple[int, int], ...]:
        """The answers' spans of a sample."""
        first, last = self._span_at[index : index + 2].tolist()
        return tuple(map(tuple, self._spans[first:last].tolist()))

    def place(self, index: int) -> tuple[int, slice]:
        """The number of a sample's shard, and its rows there."""
        row = int(self._row[index])
        return int(self._shard_of[index]), slice(row, row + int(self.lengths[index]))

    def opened(self, number: int) -> OpenShard:
        """A shard, verified. At most ``OPEN_SHARDS`` stay open."""
        path, sha256, written = self._shards[number]
        with self._opening:
            if path in self._open:
                self._open.move_to_end(path)
                return self._open[path]
        verify(path, sha256, written)  # outside the lock: it may read the whole shard
        with self._opening:
            if path not in self._open:
                self._open[path] = OpenShard(path)
            while len(self._open) > OPEN_SHARDS:
                self._open.popitem(last=False)  # closed by its last user
            return self._open[path]

    def prefetch(self, indices: list[int]) -> None:
        """Begin to read the states of samples; :meth:`states` of the same list takes them.

        While what is being read takes ``PREFETCH_BYTES``, this does nothing.
        """
        begun = sum(states.nbytes for states, _ in self._begun.values())
        if begun < PREFETCH_BYTES and tuple(indices) not in self._begun:
            self._begun[tuple(indices)] = self._begin(indices)

    def states(self, indices: list[int]) -> States:
        """See :class:`~sglang_hyperdflash.training.samples.Source`; pinned where there is a GPU."""
        states, reads = self._begun.pop(tuple(indices), None) or self._begin(indices)
        for read in reads:
            read.result()
        return states

    def _begin(self, indices: list[int]) -> tuple[States, list[Future]]:
        identity, longest = self.identity, int(self.lengths[indices].max())
        columns = {"residual": identity.hc_mult, "layers": len(identity.layer_ids)}
        options = {
            "dtype": identity.read_dtype,
            "pin_memory": torch.cuda.is_available(),
        }
        size = (len(indices), longest)
        states = States(
            **{
                name: torch.empty(*size, count * identity.hidden_size, **options)
                for name, count in columns.items()
            }
        )
        reads = [self._pool.submit(self._fill, states, row, i) for row, i in enumerate(indices)]
        return states, reads

    def _fill(self, states: States, row: int, index: int) -> None:
        number, rows = self.place(index)
        shard, n = self.opened(number), rows.stop - rows.start
        for name in ("residual", "layers"):
            out = getattr(states, name)[row]
            if out.shape[-1]:
                shard.read(name, rows.start, out[:n])
                out[n:] = 0
        # The batch is collated in another thread, which then finds the tokens in the page cache.
        shard.tokens[rows].sum()


def verify(path: Path, sha256: str, written: tuple[int, int]) -> None:
    """Check a shard's checksum, unless its size and time are those it was ``written`` with, or a
    stamp says that this very file has been checked.

    Raises:
        HyperDFlashConfigError: it differs, or the file is missing.
    """
    if as_written(path, *written):
        return
    stamp = path.parent.parent / VERIFIED / path.name
    try:
        status = path.stat()
        text = f"{sha256} {status.st_size} {status.st_mtime_ns}\n"
        if stamp.is_file() and stamp.read_text() == text:
            return
        right = file_hash(path) == sha256
    except FileNotFoundError as error:
        raise HyperDFlashConfigError(f"shard {path} is missing. {REPEAT}") from error
    if not right:
        raise HyperDFlashConfigError(
            f"shard {path} is corrupt: its SHA-256 is not the manifest's. Remove it. {REPEAT}"
        )
    with suppress(WriteFailed):  # a store that may only be read: every process verifies it
        write_text(stamp, text)

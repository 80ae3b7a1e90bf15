"""Rows of data sets as people have them, and the one list of those that a command leaves out."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from sglang_hyperdflash.tools.atomic import write_text
from sglang_hyperdflash.tools.errors import BadRow, HyperDFlashConfigError
from sglang_hyperdflash.tools.jsonl import file_rows, parse

T = TypeVar("T")
# An index from 0 over all sources (blank lines count), a ``file:line``, and the line or value.
Row = tuple[int, str, Any]
HUB = "hub:"
_HUB_NAME = re.compile(r"hub:([^/@:]*(?:/[^/@:]*)?)(?:/([^@:]*))?(?:@([^:]*))?(?::(.*))?")
SOURCES = "files (JSONL or a JSON array, also in gzip), folders of them, or hub:OWNER/NAME"
STRICT = "end at the first row that cannot be used, instead of leaving it out"


def read_rows(sources: Iterable[str | Path]) -> Iterator[Row]:
    """Rows of files, of folders, and of ``hub:OWNER/NAME[/SUBSET][@REVISION][:SPLIT]``.

    Raises:
        FileNotFoundError: nothing is there. HyperDFlashError: a file is damaged.
    """
    index = 0
    for source in map(str, sources):
        hub = source.startswith(HUB)
        rows = _hub_rows(source) if hub else chain(*map(file_rows, files_of(Path(source))))
        for where, value in rows:
            if value is not None:
                yield index, where, value
            index += 1


def files_of(place: Path) -> list[Path]:
    """A file, or the data files of a folder by name; raises ``FileNotFoundError``."""
    if place.is_file():
        return [place]
    named = re.compile(r"[^.].*(?<!\.left_out)\.jsonl?(\.gz)?")
    files = sorted(file for file in place.glob("*") if named.fullmatch(file.name))
    if not files:
        raise FileNotFoundError(f"data {place} does not exist, or holds no .json, .jsonl or .gz.")
    return files


@contextmanager
def _hub(source: str) -> Iterator[tuple[str | Any, ...]]:
    """Name, subset, revision and split; whatever the hub's client raises names the source."""
    try:
        yield _HUB_NAME.fullmatch(source).groups()
    except Exception as error:
        raise FileNotFoundError(
            f"{source} cannot be read as hub:OWNER/NAME[/SUBSET][@REVISION][:SPLIT]: {error}"
        ) from error


def _hub_rows(source: str) -> Iterator[tuple[str, Any]]:
    from datasets import load_dataset

    with _hub(source) as (name, subset, revision, split):
        rows = load_dataset(name, subset, revision=revision, split=split or "train", streaming=True)
        yield from ((f"{source}, row {number}", row) for number, row in enumerate(rows, 1))


def hub_identity(source: str) -> str:
    """A hub source's commit, named or the newest; raises ``FileNotFoundError``."""
    from huggingface_hub import HfApi

    with _hub(source) as (name, subset, revision, split):
        commit = HfApi().dataset_info(name, revision=revision).sha
        return f"{HUB}{name}/{subset or ''}@{commit}:{split or 'train'}"


@dataclass
class LeftOut:
    """The rows that a command reads but cannot use.

    Attributes:
        strict: the first one ends the command. read: rows so far. entries: those left out by their
            ``where``, each with ``index``, ``where`` and ``reason``.
    """

    strict: bool = False
    read: int = 0
    entries: dict[str, dict[str, Any]] = field(default_factory=dict)

    def usable(self, rows: Iterable[Row], use: Callable[..., T]) -> Iterator[T]:
        """What ``use(index, record, where)`` makes of rows, but of those where it is ``BadRow``."""
        for index, where, value in rows:
            self.read += 1
            try:
                record = parse(value, where)
                json.dumps(record, ensure_ascii=False, default=str).encode()
                made = use(index, record, where)
            except BadRow as error:
                reason = error.reason
            except UnicodeEncodeError:  # which no tokenizer takes
                reason = "it holds a lone surrogate, half of a character"
            else:
                yield made
                continue
            if self.strict:
                raise BadRow(where, reason)
            self.add(index, where, reason)

    def add(self, index: int, where: str, reason: str) -> None:
        """Leave out a row, once; ``strict`` is for those that the command cannot use."""
        reason = reason.encode(errors="backslashreplace").decode()  # a surrogate would end it
        self.entries.setdefault(where, {"index": index, "where": where, "reason": reason})

    def nothing_usable(self, sources: str, advice: str) -> HyperDFlashConfigError:
        """The error to raise when no row could be used."""
        last = "".join(f"; {e['where']}: {e['reason']}" for e in [*self.entries.values()][-1:])
        return HyperDFlashConfigError(f"no usable row of {self.read} in {sources}{last}. {advice}")

    @staticmethod
    def wrote(path: Path) -> bool:
        """Whether a file is one of :meth:`report`, or not there."""
        if not path.exists():
            return True
        try:
            with path.open("rb") as file:
                first = json.loads(file.readline())
        except ValueError:
            return False
        return isinstance(first, dict) and first.keys() == {"index", "where", "reason"}

    def report(self, path: Path) -> None:
        """Print the counts, with the first of each kind, and list all; raises ``WriteFailed``."""
        kinds: dict[str, list[str]] = {}
        entries = sorted(self.entries.values(), key=lambda entry: entry["index"])
        for entry in entries:
            kind = re.sub(r"\d+", "N", entry["reason"].partition(", found")[0])
            kinds.setdefault(kind, []).append(f"{entry['where']}: {entry['reason']}")
        count = len(entries)
        listed = f", listed in {path}" * bool(count)
        print(f"{self.read} rows read, {self.read - count} kept, {count} left out{listed}")
        for places in sorted(kinds.values(), key=len, reverse=True):
            print(f"  {len(places)}: {places[0]}")
        path.unlink(missing_ok=True)
        if count:
            write_text(path, "".join(json.dumps(entry) + "\n" for entry in entries))

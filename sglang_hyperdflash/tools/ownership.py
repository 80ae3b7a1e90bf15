"""One owner for every folder or file that a command writes, and one run in it at a time.

:func:`claim` (a folder) and :func:`claim_file` mark what a command writes with a small JSON file
(kind of command, run id, settings and their hash) and hold a lock beside it. A place that holds
something else, or the work of other settings, is refused before anything is written; a marker
whose content was removed refuses nobody. The lock is an ``flock``: the kernel takes it away when
its holder dies, however it dies.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import secrets
import shlex
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hyperdflash.tools.atomic import write_failed, write_json
from sglang_hyperdflash.tools.checksum import short_hash
from sglang_hyperdflash.tools.errors import HyperDFlashError
from sglang_hyperdflash.tools.structs import shown

MARKER, LOCK = ".hyperdflash.json", ".hyperdflash.lock"
VERSION = 1


class NotOurs(HyperDFlashError):
    """A folder or file that holds something else, or the work of other settings."""


class InUse(HyperDFlashError):
    """Another run holds the folder or file."""


@dataclass(frozen=True)
class Claim:
    """A place held by this run.

    Attributes:
        path: the folder or file. run_id: the same for all runs that resume one another.
        resumed: whether an earlier run of the same settings was here.
    """

    path: Path
    kind: str
    run_id: str
    resumed: bool


@dataclass(frozen=True)
class _Place:
    """Where a claim's marker and lock lie, and what is there that no marker speaks of."""

    path: Path
    is_file: bool

    @property
    def marker(self) -> Path:
        return self._beside(MARKER)

    @property
    def lock(self) -> Path:
        return self._beside(LOCK)

    def _beside(self, name: str) -> Path:
        if self.is_file:
            return self.path.with_name(f".{self.path.name}{name}")
        return self.path / name

    def contents(self) -> list[str]:
        """Names of what is there beside marker, lock and their partial files; no empty file."""
        if self.is_file:
            empty = self.path.is_file() and not self.path.stat().st_size
            return [self.path.name] if self.path.exists() and not empty else []
        if self.path.exists() and not self.path.is_dir():
            raise NotOurs(f"{self.path}: expected a folder, found a file. Choose another path.")
        if not self.path.is_dir():
            return []
        own = (MARKER, LOCK, MARKER + ".partial")
        return sorted(entry.name for entry in self.path.iterdir() if entry.name not in own)


# Open locks of this process. A forked child must not keep them when its parent dies.
_held: set[int] = set()


def _close_in_child() -> None:
    for handle in _held:
        with suppress(OSError):
            os.close(handle)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested settings as ``{"section.name": value}``."""
    flat: dict[str, Any] = {}
    for name, value in settings.items():
        flat |= (
            _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
        )
    return flat


def _differences(found: Mapping[str, Any], asked: Mapping[str, Any]) -> str:
    """The settings that differ, in words, three at most."""
    before, now = _flat(found), _flat(asked)
    absent = object()
    names = [
        name
        for name in dict.fromkeys([*now, *before])
        if before.get(name, absent) != now.get(name, absent)
    ]

    def value(settings: Mapping[str, Any], name: str) -> str:
        return shown(settings[name]) if name in settings else "nothing"

    parts = [f"{n} was {value(before, n)}, now {value(now, n)}" for n in names[:3]]
    more = f", and {len(names) - 3} more" if len(names) > 3 else ""
    return "; ".join(parts) + more


def _read_marker(place: _Place) -> dict[str, Any] | None:
    try:
        content = json.loads(place.marker.read_bytes())
        fields = {"kind": str, "run_id": str, "settings_hash": str, "settings": dict}
        if not all(isinstance(content[name], kind) for name, kind in fields.items()):
            raise TypeError("a field is of another type")
        if content["version"] != VERSION:
            raise NotOurs(
                f"{place.marker}: expected version {VERSION}, found {content['version']!r}, of "
                "another release. Choose a new path, or go on with that release."
            )
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise NotOurs(
            f"{place.marker} is damaged ({error}), so nobody can tell whose {place.path} is. "
            "Choose a new path, or remove that file and everything beside it."
        ) from error
    return content


def _check(place: _Place, kind: str, settings: Mapping[str, Any]) -> dict[str, Any] | None:
    """The marker of an earlier run that this one may go on with; None where nothing was.

    Raises:
        NotOurs: something else is there.
    """
    there = place.contents()
    if not there:
        return _marker_of_nothing(place, kind, settings)
    marker = _read_marker(place)
    if marker is None:
        shown = ", ".join(there[:3]) + (f" and {len(there) - 3} more" if len(there) > 3 else "")
        what = "no file" if place.is_file else "a new or empty folder"
        raise NotOurs(
            f"{place.path}: expected {what}, or one that `{kind}` wrote; found {shown}. Nothing "
            "was written. Choose another path."
        )
    if marker["kind"] != kind:
        raise NotOurs(
            f"{place.path}: expected what `{kind}` wrote, found what `{marker['kind']}` wrote "
            f"({place.marker} says so). Nothing was written. Choose another path."
        )
    if marker["settings_hash"] != short_hash(settings):
        raise NotOurs(
            f"{place.path} holds a run of `{kind}` with other settings: "
            f"{_differences(marker['settings'], settings)}. Nothing was written. Choose another "
            "path, repeat that run's settings to go on with it, or remove "
            f"{place.path} to begin anew."
        )
    return marker


def _marker_of_nothing(
    place: _Place, kind: str, settings: Mapping[str, Any]
) -> dict[str, Any] | None:
    """The marker of an empty place, if it is this run's own.

    Any other is what a user left who removed the content: it is replaced.
    """
    try:
        marker = _read_marker(place)
    except NotOurs:
        return None
    same = marker and (marker["kind"], marker["settings_hash"]) == (kind, short_hash(settings))
    return marker if same else None


def _holder(place: _Place) -> str:
    """Who holds the lock, in words."""
    try:
        found = json.loads(place.lock.read_bytes())
        return (
            f"process {found['pid']} on {found['host']}, since {found['since']}: {found['command']}"
        )
    except (OSError, ValueError, KeyError, TypeError):
        return "another process, which did not say its name yet"


def _lock(place: _Place) -> int:
    """Take the lock; returns its open handle.

    Raises:
        InUse: another run has it.
    """
    while True:
        handle = os.open(place.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A holder removes the file at its end: a lock on a removed file locks nobody out.
            if os.path.samestat(os.fstat(handle), os.stat(place.lock)):
                break
        except FileNotFoundError:
            pass
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                raise InUse(
                    f"{place.path} is in use by {_holder(place)}. Nothing was written. Wait for "
                    "it to end, or choose another path."
                ) from error
            raise
        os.close(handle)
    _held.add(handle)
    holder = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "command": shlex.join(sys.argv),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }
    os.ftruncate(handle, 0)
    os.write(handle, json.dumps(holder).encode())
    return handle


def _release(place: _Place, handle: int) -> None:
    if handle not in _held:  # closed in a forked child
        return
    with suppress(OSError):
        place.lock.unlink()
    _held.discard(handle)
    os.close(handle)


@contextmanager
def _claim(place: _Place, kind: str, settings: Mapping[str, Any]) -> Iterator[Claim]:
    # Settings are compared after a trip through JSON: a tuple and a list are the same there.
    settings = json.loads(json.dumps(settings, sort_keys=True))
    _check(place, kind, settings)  # before the first write, so that a refused place stays as it is
    try:
        place.marker.parent.mkdir(parents=True, exist_ok=True)
        handle = _lock(place)
    except OSError as error:
        raise write_failed(place.lock, error) from error
    try:
        marker = _check(place, kind, settings)
        resumed = marker is not None
        if marker is None:
            marker = {"kind": kind, "version": VERSION, "run_id": secrets.token_hex(8)}
            marker |= {"settings_hash": short_hash(settings), "settings": settings}
            write_json(place.marker, marker, indent=1)
        yield Claim(place.path, kind, marker["run_id"], resumed)
    finally:
        _release(place, handle)


def claim(folder: Path, kind: str, settings: Mapping[str, Any]):
    """Hold a folder for this run; a context manager that gives a :class:`Claim`.

    Args:
        folder: made when missing; must be empty, or written by a run of the same kind and settings.
        kind: the command, ``hyperdflash train``. settings: all that must not change between two
            runs into one folder, as JSON values; large content as a hash
            (``checksum.short_hash``).

    Raises:
        NotOurs: the folder holds something else, or a run with other settings (which are named).
        InUse: another run holds it (its process, host and command are named).
        WriteFailed: it cannot be written.
    """
    return _claim(_Place(Path(folder), is_file=False), kind, settings)


def claim_file(file: Path, kind: str, settings: Mapping[str, Any]):
    """:func:`claim` for a single file; marker and lock lie beside it as hidden files."""
    return _claim(_Place(Path(file), is_file=True), kind, settings)


@contextmanager
def lock(folder: Path, kind: str) -> Iterator[None]:
    """Keep a second run out of a folder that the user's own files may share; no marker is written.

    Args:
        folder: made when missing. kind: the command.

    Raises:
        NotOurs: another command marked the folder as its own. InUse, WriteFailed: as :func:`claim`.
    """
    place = _Place(Path(folder), is_file=False)
    place.contents()  # refuses a file
    marker = _read_marker(place)
    if marker is not None and marker["kind"] != kind:
        raise NotOurs(
            f"{folder}: expected a folder of data, found what `{marker['kind']}` wrote "
            f"({place.marker} says so). Nothing was written. Choose another path."
        )
    try:
        place.path.mkdir(parents=True, exist_ok=True)
        handle = _lock(place)
    except OSError as error:
        raise write_failed(place.lock, error) from error
    try:
        yield
    finally:
        _release(place, handle)


def refuse(folder: Path, kind: str, settings: Mapping[str, Any]) -> str | None:
    """What :func:`claim` checks, without writing anything.

    Returns:
        The id of the earlier run that this one would go on with; None where nothing was.

    Raises:
        NotOurs: as :func:`claim`.
    """
    return _refuse(_Place(Path(folder), is_file=False), kind, settings)


def refuse_file(file: Path, kind: str, settings: Mapping[str, Any]) -> str | None:
    """:func:`refuse` for :func:`claim_file`."""
    return _refuse(_Place(Path(file), is_file=True), kind, settings)


def _refuse(place: _Place, kind: str, settings: Mapping[str, Any]) -> str | None:
    marker = _check(place, kind, json.loads(json.dumps(settings, sort_keys=True)))
    return None if marker is None else marker["run_id"]


def keep_apart(option: str, path: Path, others: Mapping[str, str | Path]) -> None:
    """Refuse to write at, inside or around what a command reads.

    Args:
        option: the name of ``path`` for the user, ``--out``. others: what must stay as it is, by
            its name ("the target"); hub ids and files that do not exist are passed over.

    Raises:
        NotOurs: ``path`` is one of them, lies inside one, or holds one.
    """
    mine = Path(path).resolve()
    for name, other in others.items():
        if not Path(other).exists():
            continue
        theirs = Path(other).resolve()
        if mine == theirs:
            relation = f"is {name}"
        elif theirs in mine.parents:
            relation = f"lies inside {name} {other}"
        elif mine in theirs.parents:
            relation = f"holds {name} {other}"
        else:
            continue
        raise NotOurs(
            f"{option} {path} {relation}, which would be overwritten. Nothing was written. Choose "
            "another path."
        )


def location(name: str | Path) -> str:
    """A folder or file by its full path, a hub id as it is: the same for every working folder."""
    return str(Path(name).resolve()) if Path(name).exists() else str(name)

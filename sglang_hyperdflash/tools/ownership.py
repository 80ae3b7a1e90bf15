"""One owner for every folder or file that a command writes, and one run in it at a time.

:func:`claim` puts a manifest (JSON: kind of command, run id, settings) in the folder, or next to
the file, and holds a file lock meanwhile. A place with other content, or with the work of other
settings, is refused before anything is written. A leftover manifest without content does not block
a new run. The lock is an ``flock``: the kernel drops it when its holder dies, however it dies.
"""

import json
import os
import secrets
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from filelock import Timeout, UnixFileLock

from sglang_hyperdflash.tools.atomic import write_failed, write_json
from sglang_hyperdflash.tools.errors import HyperDFlashError
from sglang_hyperdflash.tools.fields import shown

Settings = Mapping[str, Any]
MANIFEST, LOCK = ".hyperdflash.json", ".hyperdflash.lock"


class NotOurs(HyperDFlashError):
    """A folder or file that holds something else, or the work of other settings."""


class InUse(HyperDFlashError):
    """Another run holds the folder or file."""


def _hidden(path: Path, name: str, is_file: bool) -> Path:
    """Return the path of the manifest or the lock of a folder or file."""
    return path.with_name(f".{path.name}{name}") if is_file else path / name


def _contents(path: Path, is_file: bool) -> list[str]:
    """Return the names of all but our own files; an empty output file does not count."""
    if path.is_file():
        return [] if is_file and not path.stat().st_size else [path.name]
    names = sorted(entry.name for entry in path.iterdir()) if path.is_dir() else []
    return [name for name in names if not name.startswith((MANIFEST, LOCK))]


def _manifest(path: Path, is_file: bool) -> dict[str, Any]:
    """Return the manifest of a folder or file; empty if none can be read."""
    with suppress(OSError, ValueError, TypeError):  # dict refuses JSON that is no object
        return dict(json.loads(_hidden(path, MANIFEST, is_file).read_bytes()))
    return {}


def _flat(settings: Any, name: str = "") -> dict[str, str]:
    """Return nested settings as ``{"section.name": value}``."""
    if not isinstance(settings, dict):
        return {name: shown(settings)}
    parts = (_flat(value, f"{name}.{key}" if name else key) for key, value in settings.items())
    return {key: value for part in parts for key, value in part.items()}


def check(path: Path, kind: str, settings: Settings, *, is_file: bool = False) -> str | None:
    """Return the id of the run that :func:`claim` would resume, or None, without writing.

    Raises:
        NotOurs: as :func:`claim`.
    """
    settings = json.loads(json.dumps(settings))  # a tuple is a list in JSON
    # The content first: another run may begin between the two looks, and writes its manifest first.
    names = _contents(path, is_file)
    manifest = _manifest(path, is_file)
    owner, recorded = manifest.get("kind"), manifest.get("settings")
    if (owner, recorded) == (kind, settings):
        return manifest.get("run_id")
    if not names:
        return None
    if owner == kind:
        old, new = _flat(recorded), _flat(settings)
        changed = [name for name in new | old if old.get(name) != new.get(name)]
        parts = [f"{n} was {old.get(n, 'unset')}, now {new.get(n, 'unset')}" for n in changed]
        more = f" and {len(parts) - 3} more" if len(parts) > 3 else ""
        raise NotOurs(
            f"{path} holds a run of `{kind}` with other settings: {'; '.join(parts[:3])}{more}. "
            "Nothing was written. Choose another path, restore those settings to resume that run, "
            f"or remove {path} to start over."
        )
    content = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    raise NotOurs(
        f"{path}: expected {'no file' if is_file else 'a new or empty folder'}, or the output of "
        f"`{kind}`; found {f'that of `{owner}`' if owner else content}. Nothing was written. "
        "Choose another path."
    )


@contextmanager
def claim(path: Path, kind: str, settings: Settings, *, is_file: bool = False) -> Iterator[str]:
    """Hold a folder, or a file, for this run; yield the run's id, which runs that resume it keep.

    Args:
        path: made when missing; must be empty, or written by a run of the same kind and settings.
        kind: the command, ``hyperdflash train``.
        settings: all that must not change between two runs into one place, as JSON values; large
            content as a hash.

    Raises:
        NotOurs: it holds something else, or a run with other settings (which are named).
        InUse: another run holds it (its process and host are named).
        WriteFailed: it cannot be written.
    """
    check(path, kind, settings, is_file=is_file)  # before the lock: a refused place stays as it is
    with _locked(path, is_file):
        run_id = check(path, kind, settings, is_file=is_file)
        if run_id is None:
            run_id = secrets.token_hex(8)
            manifest = {"kind": kind, "run_id": run_id, "settings": settings}
            write_json(_hidden(path, MANIFEST, is_file), manifest, indent=1)
        yield run_id


@contextmanager
def lock(folder: Path, kind: str) -> Iterator[None]:
    """Keep a second run out of a folder that may hold a user's own files; write no manifest.

    Raises ``NotOurs`` for another command's folder, ``InUse`` and ``WriteFailed`` as :func:`claim`.
    """
    owner = _manifest(folder, is_file=False).get("kind", kind)
    if owner != kind:
        raise NotOurs(
            f"{folder}: expected a folder of data, found the output of `{owner}`. Nothing was "
            "written. Choose another path."
        )
    with _locked(folder, is_file=False):
        yield


@contextmanager
def _locked(path: Path, is_file: bool) -> Iterator[None]:
    """Hold a place's lock; raise ``InUse`` or ``WriteFailed``.

    filelock closes the descriptor in a forked child. It also checks that the file it locked still
    has its name, so the holder may remove the file.
    """
    file = _hidden(path, LOCK, is_file)
    file_lock = UnixFileLock(file, fallback_to_soft=False)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file_lock.acquire(blocking=False)
        file.write_text(f"process {os.getpid()} on {socket.gethostname()}")
    except Timeout as error:
        holder = file.read_text() if file.is_file() else ""
        raise InUse(
            f"{path} is in use by {holder or 'another process'}. Nothing was written. Wait for it "
            "to end, or choose another path."
        ) from error
    except OSError as error:
        raise write_failed(file, error) from error
    try:
        yield
    finally:
        if file_lock.is_locked:  # not in a forked child
            file.unlink(missing_ok=True)
            file_lock.release()


def keep_apart(option: str, path: Path, inputs: Mapping[str, str | Path]) -> None:
    """Refuse to write at, inside or around what a command reads.

    Args:
        option: the name of ``path`` for the user, ``--out``.
        path: where the command writes.
        inputs: what must stay as it is, by its name ("the target"); hub ids and files that do not
            exist are passed over.

    Raises:
        NotOurs: ``path`` is one of them, lies inside one, or holds one.
    """
    output = path.resolve()
    for name, path_or_id in inputs.items():
        source = Path(path_or_id).resolve()
        relations = {"is": output == source, "lies inside": source in output.parents}
        relations["holds"] = output in source.parents
        relation = next((words for words, is_true in relations.items() if is_true), None)
        if relation is not None and source.exists():
            raise NotOurs(
                f"{option} {path} {relation} {name} {path_or_id}, which would be overwritten. "
                "Nothing was written. Choose another path."
            )


def location(name: str | Path) -> str:
    """Return the full path of a file or folder, which need not exist; a hub id as it is.

    A string is a path where one exists.
    """
    is_path = isinstance(name, Path) or Path(name).exists()
    return str(Path(name).resolve()) if is_path else name

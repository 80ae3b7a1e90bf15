"""Atomic files: written under a temporary name, flushed to disk, then renamed.

The temporary name is fixed (``NAME.partial``), so that a killed writer leaves one file at most and
the next one overwrites it. Two writers of one file must be kept apart by ``ownership``.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from sglang_hyperdflash.tools.errors import HyperDFlashError


class WriteFailed(HyperDFlashError):
    """A file could not be written: a full disk or a missing permission."""


def write_failed(path: Path, error: Exception) -> WriteFailed:
    """Return the error to raise when ``path`` could not be written; it says what is kept."""
    reason = error.strerror if isinstance(error, OSError) and error.strerror else error
    unchanged = f"{path} is as it was before. " if path.is_file() else ""
    return WriteFailed(
        f"cannot write {path}: {reason}. {unchanged}"
        "Free space or choose a writable place, then repeat the command."
    )


@contextmanager
def replacing(path: Path, failures: tuple[type[Exception], ...] = (OSError,)) -> Iterator[Path]:
    """Yield a temporary path, which becomes ``path`` when the block ends without an error.

    Args:
        path: the file; its folder is made.
        failures: what a library raises for a full disk besides ``OSError`` (``RuntimeError`` of
            torch.save, ``SafetensorError``).

    Raises:
        WriteFailed: the disk is full or the place cannot be written; ``path`` is as before.
    """
    partial = path.with_name(path.name + ".partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # Some libraries set their own file mode; this one follows the umask.
        with partial.open("wb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o777
        yield partial
        with partial.open("rb+") as file:
            os.fchmod(file.fileno(), mode)
            os.fsync(file.fileno())
        partial.replace(path)
    except BaseException as error:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        if isinstance(error, (OSError, *failures)):
            raise write_failed(path, error) from error
        raise
    # A rename is on disk only when its folder is; not every file system can flush a folder.
    with suppress(OSError):
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def write_text(path: Path, content: str) -> None:
    """Write UTF-8 text whole; raises ``WriteFailed``."""
    with replacing(path) as partial:
        partial.write_bytes(content.encode("utf-8"))


def write_json(path: Path, content: Any, indent: int | None = None) -> None:
    """Write JSON whole, with a final newline; raises ``WriteFailed``."""
    write_text(path, json.dumps(content, indent=indent) + "\n")

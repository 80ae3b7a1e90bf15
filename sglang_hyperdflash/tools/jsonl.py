"""JSON lines: a reader whose errors name file and line, a writer that survives a kill."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from sglang_hyperdflash.tools.atomic import write_failed
from sglang_hyperdflash.tools.errors import HyperDFlashError


class JsonlError(HyperDFlashError):
    """A malformed line; the message starts with ``file:line``."""


def _encode(record: dict[str, Any]) -> bytes:
    try:
        return json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"
    except UnicodeEncodeError:  # a lone surrogate, which only an escape can hold
        return json.dumps(record).encode("ascii") + b"\n"


def parse(line: bytes, where: str) -> dict[str, Any]:
    """One line's object; ``where`` is its ``file:line``.

    Raises:
        JsonlError: not UTF-8, not JSON, or not an object.
    """
    reason = ""
    try:
        value = json.loads(line.decode("utf-8"))
        if isinstance(value, dict):
            return value
    except json.JSONDecodeError as error:
        reason = f" ({error.msg} at column {error.colno})"
    except UnicodeDecodeError as error:
        reason = f" ({error})"
    text = line.decode("utf-8", errors="replace").strip()
    text = text if len(text) <= 80 else text[:77] + "..."
    raise JsonlError(
        f"{where}: expected a JSON object, found {text!r}{reason}. Fix or remove this line."
    )


def read_lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Every line that is not blank, as ``(its number from 1, its value)``.

    Raises:
        JsonlError: the file is missing, or a line is wrong (see :func:`parse`).
    """
    try:
        file = path.open("rb")
    except OSError as error:
        raise JsonlError(
            f"{path}: expected a file of JSON lines, found none ({error.strerror})."
        ) from error
    with file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield number, parse(line, f"{path}:{number}")


class ResumableWriter:
    """Appends JSON objects to a file; the file of a killed run is reopened and continued.

    A last line without a newline was cut by a kill: it is dropped. A damaged byte elsewhere is
    noticed only where it breaks the JSON. Two processes must be kept apart by ``ownership``.

    Args:
        see: called with each record that the file holds; none is kept in memory.

    Attributes:
        torn: the number of the line that was cut, or None.

    Raises:
        JsonlError: a line inside the file is not a JSON object.
        WriteFailed: the file cannot be written.
    """

    def __init__(self, path: Path, see: Callable[[dict[str, Any]], None]) -> None:
        self.path = path
        self.torn: int | None = None
        whole = 0
        if path.is_file():
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        self.torn = number
                        break
                    if line.strip():
                        see(parse(line, f"{path}:{number}"))
                    whole += len(line)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            if self.torn:
                os.ftruncate(self._file.fileno(), whole)
        except OSError as error:
            raise write_failed(path, error) from error

    def append(self, record: dict[str, Any]) -> None:
        """Add one line, whole or not at all.

        Raises:
            WriteFailed: the disk is full; the lines before are whole.
        """
        line = _encode(record)
        end = os.fstat(self._file.fileno()).st_size
        try:
            written = 0
            while written < len(line):
                written += os.write(self._file.fileno(), line[written:])
        except BaseException as error:
            os.ftruncate(self._file.fileno(), end)
            if isinstance(error, OSError):
                raise write_failed(self.path, error) from error
            raise

    def flush(self) -> None:
        """Have all lines on the disk.

        Raises:
            WriteFailed: they are not there; some network file systems say only now that they are
                full.
        """
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            raise write_failed(self.path, error) from error

    def close(self) -> None:
        """Flush and close."""
        if not self._file.closed:
            with self._file:
                self.flush()

    def __enter__(self) -> ResumableWriter:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

"""JSON lines: a reader whose errors name file and line, a writer that survives a kill."""

import gzip
import io
import json
import os
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from sglang_hyperdflash.tools.atomic import write_failed
from sglang_hyperdflash.tools.errors import BadRow, HyperDFlashError
from sglang_hyperdflash.tools.fields import shown


def parse(line: Any, where: str) -> dict[str, Any]:
    """Return the object of one line, as bytes or parsed; ``where`` is its ``file:line``.

    Raises:
        BadRow: not UTF-8, not JSON, or not an object.
    """
    value, reason = line, ""
    try:
        value = json.loads(line.decode("utf-8-sig")) if isinstance(line, bytes) else line
        if isinstance(value, dict):
            return value
    except (ValueError, RecursionError) as error:
        value, reason = line.decode("utf-8", errors="replace").strip(), f" ({error})"
    raise BadRow(where, f"expected a JSON object, found {shown(value)}{reason}")


def file_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield every line's place and bytes, None if it is blank; or the values of a JSON array.

    Raises:
        OSError: there is no such file.
        HyperDFlashError: the file is damaged.
    """
    with path.open("rb") as file:
        opener = gzip.open if file.read(2) == b"\x1f\x8b" else open
    try:
        with opener(path, "rb") as file:
            lines: Iterable[bytes] = file
            if file.peek(64).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"["):
                lines = io.BytesIO(content := file.read())
                # What is no JSON array is lines, of which the first is no object.
                with suppress(ValueError, RecursionError):
                    for n, value in enumerate(json.loads(content), 1):
                        yield f"{path}, row {n}", b"null" if value is None else value
                    return
            for number, line in enumerate(lines, 1):
                yield f"{path}:{number}", line if line.strip() else None
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise HyperDFlashError(f"{path} is damaged: {error}. Copy it again.") from error


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield every object of a file and its place; raise as :func:`file_rows` and :func:`parse`."""
    return ((where, parse(v, where)) for where, v in file_rows(path) if v is not None)


class ResumableWriter(AbstractContextManager):
    """Appends JSON objects to a file; the file of a killed run is reopened and continued.

    A last line without a newline was cut by a kill: it is dropped. A damaged byte elsewhere is
    noticed only where it breaks the JSON. Two processes must be kept apart by ``ownership``.

    Args:
        path: the file; its folder is made.
        see: called with each record that the file holds; none is kept in memory.

    Attributes:
        torn: the number of the line that was cut, or None.

    Raises:
        BadRow: a line inside the file is not a JSON object.
        WriteFailed: the file cannot be written.
    """

    def __init__(self, path: Path, see: Callable[[dict[str, Any]], None]) -> None:
        self.path = path
        self.torn: int | None = None
        length = 0  # of the whole lines, in bytes
        if path.is_file():
            with path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        self.torn = number
                        break
                    if line.strip():
                        see(parse(line, f"{path}:{number}"))
                    length += len(line)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)
            if self.torn:
                os.ftruncate(self._file.fileno(), length)
        except OSError as error:
            raise write_failed(path, error) from error

    def append(self, record: dict[str, Any]) -> None:
        """Add one line, whole or not at all.

        Raises:
            WriteFailed: the disk is full; the lines before are whole.
        """
        try:
            line = json.dumps(record, ensure_ascii=False).encode("utf-8") + b"\n"
        except UnicodeEncodeError:  # a lone surrogate, which only an escape can hold
            line = json.dumps(record).encode("ascii") + b"\n"
        size = os.fstat(self._file.fileno()).st_size
        try:
            while line:
                line = line[os.write(self._file.fileno(), line) :]
        except BaseException as error:
            os.ftruncate(self._file.fileno(), size)
            if isinstance(error, OSError):
                raise write_failed(self.path, error) from error
            raise

    def flush(self) -> None:
        """Flush all lines to the disk.

        Raises:
            WriteFailed: they are not; some network file systems say only now that they are full.
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

    def __exit__(self, *exception: object) -> None:
        self.close()

"""Published drafters: a folder of numbered versions, and one pointer to the newest.

    FOLDER/000001/   an ordinary drafter folder, and version.json with the SHA-256 of its files
    FOLDER/000001/withdrawn   why the learner has withdrawn it, if it has
    FOLDER/current   the newest version's name; replaced atomically, after its files are on disk

The files of a version never change once ``current`` names it, and a partly written version is never
named, so no reader sees one. The newest few versions stay on disk. When a version is withdrawn, the
one before it is current.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from sglang_hyperdflash.draft.checkpoint import weight_files
from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.tools.atomic import replacing, write_failed, write_json, write_text
from sglang_hyperdflash.tools.checksum import file_hash
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

POINTER, MANIFEST, WITHDRAWN = "current", "version.json", "withdrawn"
CONFIG = "config.json"
# The load_format of an update from disk whose folder is a drafter's: no rank has to look.
DRAFTER_FORMAT = "hyperdflash"
DIGITS = 6
# The number of whole versions that stay in the folder.
KEPT = 3


@dataclass(frozen=True)
class Version:
    """A published drafter: its number, from 1 on, and its folder."""

    number: int
    path: Path

    def is_withdrawn(self) -> bool:
        """Whether it drafted worse than the one before it."""
        return (self.path / WITHDRAWN).is_file()

    def check(self) -> None:
        """Compare every file with its SHA-256.

        Raises:
            HyperDFlashConfigError: a file is missing or has changed since it was published.
            OSError: a file cannot be read now.
        """
        try:
            expected = json.loads((self.path / MANIFEST).read_bytes())["sha256"]
            wrong = [name for name in expected if file_hash(self.path / name) != expected[name]]
        except (FileNotFoundError, ValueError, KeyError, TypeError) as error:
            raise HyperDFlashConfigError(
                f"published drafter {self.path} cannot be read: {error!r}. Publish it again."
            ) from error
        if wrong or not expected:
            raise HyperDFlashConfigError(
                f"published drafter {self.path} is damaged: {', '.join(wrong) or MANIFEST} differs "
                "from what was published. Publish it again."
            )


def _name(number: int) -> str:
    return f"{number:0{DIGITS}d}"


def _numbers(folder: Path) -> list[int]:
    """Return the numbers of all versions in order, also of those that are not whole."""
    return sorted(int(path.name) for path in folder.iterdir() if path.name.isdecimal())


def _is_whole(folder: Path, number: int) -> bool:
    return (folder / _name(number) / MANIFEST).is_file()


def _remove_old(folder: Path, taken: Sequence[int], source: Path) -> None:
    """Remove old versions and those that are not whole, to make room for another one.

    Args:
        taken: all numbers, in order; a running call may still write the newest.
        source: the folder that will be published, which may be an old version itself.
    """
    named = None
    with suppress(HyperDFlashConfigError):
        named = current(folder)
    whole = [n for n in taken if _is_whole(folder, n)]
    kept = {*whole[1 - KEPT :], named and named.number, max(taken, default=0)}
    for number in {*taken} - kept:
        path = folder / _name(number)
        if path.resolve() != source.resolve():
            shutil.rmtree(path, ignore_errors=True)


def publish(folder: Path, drafter: Path) -> int:
    """Copy a drafter folder in as the next version and move the pointer to it.

    Only ``config.json`` and the weights are copied. No number is used twice, not even that of an
    interrupted call. All but the newest ``KEPT`` versions are removed, but never the current one; a
    reader of a version that is removed meanwhile finds it damaged.

    Returns:
        The version's number.

    Raises:
        HyperDFlashConfigError: ``drafter`` is not a drafter folder.
        WriteFailed: the disk is full or the folder cannot be written; the pointer is as before.
    """
    load_config(drafter)
    weights = weight_files(drafter)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        taken = _numbers(folder)
        number = max(taken, default=0) + 1
        version = Version(number, folder / _name(number))
        version.path.mkdir()
        _remove_old(folder, taken, drafter)
    except OSError as error:
        raise write_failed(folder, error) from error
    for file in (drafter / CONFIG, *weights):
        with replacing(version.path / file.name) as partial:
            shutil.copyfile(file, partial)
    hashes = {path.name: file_hash(path) for path in sorted(version.path.iterdir())}
    write_json(version.path / MANIFEST, {"sha256": hashes}, indent=2)
    write_text(folder / POINTER, _name(version.number) + "\n")
    return version.number


def current(folder: Path) -> Version | None:
    """Return the newest version that is not withdrawn, or None.

    Raises:
        HyperDFlashConfigError: the pointer cannot be read, or names no version.
    """
    pointer = folder / POINTER
    try:
        name = pointer.read_text().strip()
        is_number = name.isascii() and name.isdecimal() and len(name) < 20
        known = is_number and (folder / name).is_dir()
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise HyperDFlashConfigError(f"{pointer} cannot be read: {error}.") from error
    if not known:
        raise HyperDFlashConfigError(
            f"{pointer}: expected the name of a version in {folder}, found {name[:60]!r}. Publish "
            "a drafter again."
        )
    version = Version(int(name), folder / name)
    if not version.is_withdrawn():
        return version
    older = (n for n in reversed(_numbers(folder)) if n < version.number and _is_whole(folder, n))
    versions = (Version(number, folder / _name(number)) for number in older)
    return next((version for version in versions if not version.is_withdrawn()), None)


def withdraw(folder: Path, number: int, reason: str) -> None:
    """Mark a version as withdrawn, with the reason.

    Raises:
        WriteFailed: the folder cannot be written.
    """
    write_text(folder / _name(number) / WITHDRAWN, reason + "\n")

"""Hashes of JSON content, of files and of bytes."""

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def short_hash(content: Any) -> str:
    """Return 16 hex digits of the SHA-256 of JSON content; the order of keys does not matter."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def file_hash(path: Path) -> str:
    """Return the SHA-256 of a file's bytes, in hex."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def bytes_hash(parts: Iterable[bytes]) -> str:
    """Return 16 hex digits of the SHA-256 of pieces, one after another."""
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()[:16]

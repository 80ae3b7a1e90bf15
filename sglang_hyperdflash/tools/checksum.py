"""Short hashes of JSON content, and records that carry their own, so that damage is noticed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

CHECKSUM = "checksum"


def short_hash(content: Any) -> str:
    """16 hex digits of the SHA-256 of JSON content; the order of keys does not matter."""
    text = json.dumps(content, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def sealed(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record with the hash of all its other fields under ``checksum``, as its last field."""
    body = {key: value for key, value in record.items() if key != CHECKSUM}
    return {**body, CHECKSUM: short_hash(body)}


def is_intact(record: Any) -> bool:
    """Whether a record read from a file is what :func:`sealed` gave."""
    if not isinstance(record, dict) or CHECKSUM not in record:
        return False
    body = {key: value for key, value in record.items() if key != CHECKSUM}
    return record[CHECKSUM] == short_hash(body)

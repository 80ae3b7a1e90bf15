"""Fields of JSON and TOML files, checked by pydantic; an error is one line that names the field."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

T = TypeVar("T")
Keys = tuple[str | int, ...]
# Of pydantic's dataclasses: no number for a text, no field that is not ours.
OPEN = ConfigDict(strict=True, allow_inf_nan=False)
CLOSED = OPEN | ConfigDict(extra="forbid")


def shown(value: Any) -> str:
    """A value as the file spells it, 60 characters at most."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _known(kind: Any, keys: Keys) -> str:
    """The fields of the section at some keys of a file."""
    for key in keys:
        if isinstance(key, str):
            kind = get_type_hints(kind)[key]
            kind = next(filter(is_dataclass, get_args(kind)), kind)
    return ", ".join(sorted(field.name for field in fields(kind)))


def checked(raw: Any, kind: type[T], name: Callable[[Keys], str]) -> T:
    """Convert what a TOML or JSON file holds to a dataclass of pydantic.

    Args:
        kind: its annotations are the check. name: the place of a value in words, by its keys from
            the top; ``()`` is the whole.

    Raises:
        HyperDFlashConfigError: a field is missing, unknown, of another type or out of range; the
            message starts with its place.
    """
    try:
        return TypeAdapter(kind).validate_json(json.dumps(raw, default=str))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        keys = first["loc"]
        said = re.sub(r"^\w+ should ", "must ", first["msg"])
        said = said.removesuffix(" after validation, not 0")
        message = f"{name(keys)} {said}, found {shown(first['input'])}."
        if first["type"] == "missing":
            message = f"{name(keys)} is missing."
        elif first["type"] == "unexpected_keyword_argument":
            known = _known(kind, keys[:-1])
            message = f"{name(keys[:-1])}: unknown field {keys[-1]}; known are {known}."
        raise HyperDFlashConfigError(message) from error

"""Fields of JSON and TOML files, checked by pydantic; an error is one line that names the field."""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

T = TypeVar("T")
# Of pydantic's dataclasses: no number for a text, no field that is not ours.
OPEN = ConfigDict(strict=True, allow_inf_nan=False)
CLOSED = OPEN | ConfigDict(extra="forbid")


def shown(value: Any) -> str:
    """A value as the file spells it, 60 characters at most."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _known(kind: Any, keys: tuple[str | int, ...]) -> str:
    """The fields of the section at some keys of a file."""
    for key in keys:
        if isinstance(key, str):
            kind = get_type_hints(kind)[key]
            kind = next(filter(is_dataclass, get_args(kind)), kind)
    return ", ".join(sorted(field.name for field in fields(kind)))


def _place(where: str, keys: tuple[str | int, ...]) -> str:
    """A value's place in words: ``FILE: stage 1.lr``."""
    words = "".join(f" {key + 1}" if isinstance(key, int) else f".{key}" for key in keys)
    return f"{where}: {words[1:]}" if words else where


def checked(raw: Any, kind: type[T], where: str) -> T:
    """Convert what a TOML or JSON file holds to a dataclass of pydantic.

    Args:
        kind: its annotations are the check. where: names the file in errors.

    Raises:
        HyperDFlashConfigError: a field is missing, unknown, of another type or out of range; the
            message starts with its place.
    """
    try:
        return TypeAdapter(kind).validate_json(json.dumps(raw, default=str))
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        keys, kind_of_error = first["loc"], first["type"]
        said = re.sub(r"^\w+ should ", "must ", first["msg"])
        said = said.removesuffix(" after validation, not 0")
        message = f"{_place(where, keys)} {said}, found {shown(first['input'])}."
        if kind_of_error == "missing":
            message = f"{_place(where, keys)} is missing."
        elif kind_of_error == "unexpected_keyword_argument":
            section, known = _place(where, keys[:-1]), _known(kind, keys[:-1])
            message = f"{section}: unknown field {keys[-1]}; known are {known}."
        raise HyperDFlashConfigError(message) from error

"""Fields of JSON and TOML files, checked by pydantic; an error is one line that names the field."""

import json
import re
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

T = TypeVar("T")
# Of pydantic's dataclasses: both take no number for a text, CLOSED takes no unknown field either.
OPEN = ConfigDict(strict=True, allow_inf_nan=False)
CLOSED = OPEN | ConfigDict(extra="forbid")


def shown(value: Any) -> str:
    """Return a value as the file spells it, 60 characters at most."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def json_object(content: str | bytes, where: str, advice: str) -> dict[str, Any]:
    """Parse a JSON object; raise ``HyperDFlashConfigError`` with its place and the advice."""
    try:
        value = json.loads(content)
    except ValueError as error:
        raise HyperDFlashConfigError(f"{where} is not JSON: {error}. {advice}") from error
    if not isinstance(value, dict):
        raise HyperDFlashConfigError(
            f"{where}: expected a JSON object, found {shown(value)}. {advice}"
        )
    return value


def _known(kind: Any, keys: tuple[str | int, ...]) -> str:
    """Return the names of the fields of the section at some keys of a file."""
    for key in keys:
        if isinstance(key, str):
            kind = get_type_hints(kind)[key]
            kind = next(filter(is_dataclass, get_args(kind)), kind)
    return ", ".join(sorted(field.name for field in fields(kind)))


def _place(where: str, keys: tuple[str | int, ...]) -> str:
    """Return a value's place in words: ``FILE: stage 1.lr``."""
    words = "".join(f" {key + 1}" if isinstance(key, int) else f".{key}" for key in keys)
    return f"{where}: {words[1:]}" if words else where


def checked(raw: Any, kind: type[T], where: str) -> T:
    """Convert what a TOML or JSON file holds to a dataclass of pydantic.

    Args:
        raw: the parsed content of the file.
        kind: the dataclass; its annotations are the check.
        where: names the file in errors.

    Raises:
        HyperDFlashConfigError: a field is missing, unknown, of another type or out of range; the
            message starts with its place.
    """
    try:
        return TypeAdapter(kind).validate_json(json.dumps(raw, default=str))
    except ValidationError as error:
        details = error.errors(include_url=False)[0]
        keys = details["loc"]
        if details["type"] == "missing":
            message = f"{_place(where, keys)} is missing."
        elif details["type"] == "unexpected_keyword_argument":
            section, known = _place(where, keys[:-1]), _known(kind, keys[:-1])
            message = f"{section}: unknown field {keys[-1]}; known are {known}."
        else:
            expected = re.sub(r"^\w+ should ", "must ", details["msg"])
            expected = expected.removesuffix(" after validation, not 0")
            message = f"{_place(where, keys)} {expected}, found {shown(details['input'])}."
        raise HyperDFlashConfigError(message) from error

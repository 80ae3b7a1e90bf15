"""Configuration sections as msgspec structs, and their errors in words that name the field."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec
from msgspec import inspect

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

T = TypeVar("T")
Keys = tuple[str | int, ...]
_AT = re.compile(r"^(?P<what>.*?)(?: - at `\$?(?P<path>[^`]*)`)?$", re.DOTALL)
_KEY = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_FIELD = re.compile(r"field `([^`]*)`")
_WORDS = {
    inspect.IntType: "a whole number",
    inspect.FloatType: "a number",
    inspect.StrType: "text",
    inspect.BoolType: "true or false",
    inspect.ListType: "a list",
    inspect.VarTupleType: "a list",
    inspect.NoneType: "null",
}


def shown(value: Any) -> str:
    """A value as the file spells it, 60 characters at most."""
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def _bare(info: inspect.Type) -> inspect.Type:
    """A type without its description."""
    return info.type if isinstance(info, inspect.Metadata) else info


def _bounds(info: inspect.Type) -> str:
    names = {"gt": "above", "ge": "at least", "lt": "below", "le": "at most"}
    found = [(word, getattr(info, name, None)) for name, word in names.items()]
    parts = [f"{word} {value:g}" for word, value in found if value is not None]
    if getattr(info, "min_length", None):
        parts.append("not empty")
    return " and ".join(parts)


def _expected(info: inspect.Type, *, kind: bool) -> str:
    """What a type takes, in words: its kind, or the bounds of that kind."""
    info = _bare(info)
    if isinstance(info, inspect.UnionType):
        parts = [_expected(t, kind=kind) for t in info.types if not isinstance(t, inspect.NoneType)]
        null = kind and any(isinstance(t, inspect.NoneType) for t in info.types)
        return " or ".join([*parts, "null"] if null else parts)
    if isinstance(info, inspect.LiteralType):
        return f"one of {', '.join(map(str, info.values))}"
    if kind or not _bounds(info):
        if isinstance(info, (inspect.ListType, inspect.VarTupleType)):
            return f"a list of {_expected(info.item_type, kind=True).removeprefix('a ')}"
        return _WORDS.get(type(info), "a table")
    return _bounds(info)


def _inside(info: inspect.Type, key: str | int) -> inspect.Type:
    """The type of what lies under a key."""
    info = _bare(info)
    if isinstance(info, inspect.UnionType):
        info = _bare(next(t for t in info.types if not isinstance(t, inspect.NoneType)))
    if isinstance(info, inspect.StructType):
        return next(f.type for f in info.fields if f.encode_name == key)
    if isinstance(info, inspect.DictType):
        return info.value_type
    return info.item_type


def _keys(path: str | None) -> Keys:
    return tuple(name or (int(at) if at.isdigit() else at) for name, at in _KEY.findall(path or ""))


def _not_finite(value: Any, keys: Keys = ()) -> Keys | None:
    """Where a number is infinite or no number; None when all are plain."""
    if isinstance(value, float):
        return None if math.isfinite(value) else keys
    inside = value.items() if isinstance(value, Mapping) else ()
    inside = enumerate(value) if isinstance(value, (list, tuple)) else inside
    return next((bad for key, entry in inside if (bad := _not_finite(entry, (*keys, key)))), None)


def _message(raw: Any, kind: type, error: msgspec.ValidationError, name: Callable[[Keys], str]):
    what, path = _AT.match(str(error)).groups()
    keys = _keys(path)
    info: inspect.Type = inspect.type_info(kind)
    value = raw
    for key in keys:
        info = _inside(info, key)
        value = None if key == "..." or value is None else value[key]
    info = _bare(info)
    if "missing required field" in what:
        return f"{name((*keys, _FIELD.search(what).group(1)))} is missing."
    if "unknown field" in what:
        if isinstance(info, inspect.UnionType):
            info = next(t for t in info.types if isinstance(t, inspect.StructType))
        known = ", ".join(sorted(f.encode_name for f in info.fields))
        return f"{name(keys)}: unknown field {_FIELD.search(what).group(1)}; known are {known}."
    expected = _expected(info, kind=", got" in what)
    found = "" if keys and keys[-1] == "..." else f", found {shown(value)}"
    return f"{name(keys)} must be {expected}{found}."


def checked(raw: Any, kind: type[T], name: Callable[[Keys], str]) -> T:
    """Convert what a TOML or JSON file holds to a struct.

    Args:
        kind: a ``msgspec.Struct``; its annotations are the check. name: the place of a value in
            words, by its keys from the top; ``()`` is the whole.

    Raises:
        HyperDFlashConfigError: a field is missing, unknown, of another type or out of range; the
            message starts with its place.
    """
    bad = _not_finite(raw)
    if bad is not None:
        raise HyperDFlashConfigError(f"{name(bad)} must be a finite number.")
    try:
        return msgspec.convert(raw, kind)
    except msgspec.ValidationError as error:
        raise HyperDFlashConfigError(_message(raw, kind, error, name)) from error

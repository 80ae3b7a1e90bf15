"""Chat data to samples: several JSONL forms, the target's chat template, assistant-only masks.

Forms, told apart by their fields: ``{"messages": [{"role", "content"}]}``; ShareGPT's
``{"conversations": [{"from", "value"}]}`` (or, as in EagleChat, with role and content);
``{"instruction", "output"}`` (Evol-CodeAlpaca); ``{"turns": [...]}``, user turns without answers,
for ``hyperdflash regenerate``, whose own lines hold ``samples`` with the target's exact tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hyperdflash.tools.chat_template import render
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.fields import shown
from sglang_hyperdflash.tools.jsonl import read_lines
from sglang_hyperdflash.training.samples import Sample

Messages = list[dict[str, str]]
_ROLES = {"system": "system", "user": "user", "human": "user"}
_ROLES |= {"assistant": "assistant", "gpt": "assistant"}
HUB = "hub:"


def read_conversations(path: str | Path) -> Iterator[tuple[Messages, str]]:
    """Conversations of a file, each a list of ``{"role", "content"}``, and its place."""
    for record, where in read_records(path):
        yield parse_conversation(record, where), where


def read_records(path: str | Path) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Objects of a file's lines, each with the ``file:line`` that names it in errors.

    ``hub:OWNER/NAME`` (``hub:OWNER/NAME:SPLIT``) streams a data set of the hub, row by row.

    Raises:
        FileNotFoundError: no such file or data set. HyperDFlashError: it is empty, or a line is no
            JSON object.
    """
    if str(path).startswith(HUB):
        yield from _hub_rows(str(path).removeprefix(HUB))
        return
    path, number = Path(path), 0
    if not path.is_file():
        raise FileNotFoundError(f"data file {path} does not exist.")
    for number, record in read_lines(path):
        yield record, f"{path}:{number}"
    if not number:
        raise HyperDFlashConfigError(f"data file {path} is empty.")


def _hub_rows(name: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    from datasets import load_dataset

    name, _, split = name.partition(":")
    try:
        rows = load_dataset(name, split=split or "train", streaming=True)
    except Exception as error:  # the hub client raises many kinds
        raise FileNotFoundError(f"data set {name} cannot be read from the hub: {error}") from error
    for number, row in enumerate(rows, 1):
        yield row, f"{HUB}{name}, row {number}"


def parse_conversation(record: Mapping[str, Any], where: str) -> Messages:
    """One line's object in any of the forms; ``where`` names it in errors."""
    listed = next((name for name in ("messages", "conversations") if name in record), None)
    if listed is not None:
        messages = [_message(m, where) for m in _list(record, listed, where)]
    elif "instruction" in record and "output" in record:
        prompt, extra = record["instruction"], record.get("input") or ""
        prompt = f"{prompt}\n{extra}" if extra and isinstance(prompt, str) else prompt
        messages = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": record["output"]},
        ]
    elif "turns" in record:
        messages = [{"role": "user", "content": t} for t in _list(record, "turns", where)]
    else:
        raise HyperDFlashConfigError(
            f"{where} needs messages, conversations, instruction and output, or turns; found "
            f"{', '.join(map(repr, record)) or 'nothing'}."
        )
    for message in messages:
        if not isinstance(message["content"], str):
            raise HyperDFlashConfigError(
                f"{where}: every message must be text, found {shown(message['content'])} of the "
                f"{message['role']}. Fix or remove this line."
            )
    return messages


def line_samples(tokenizer, record: Mapping[str, Any], where: str) -> list[Sample]:
    """The samples of one line: regenerated tokens as they are, else its conversation's one."""
    if "samples" in record:
        return [_regenerated(entry, where) for entry in _list(record, "samples", where)]
    sample = to_sample(tokenizer, parse_conversation(record, where), where)
    return [] if sample is None else [sample]


def _regenerated(entry: Any, where: str) -> Sample:
    try:
        tokens = [int(token) for token in entry["tokens"]]
        spans = tuple((int(start), int(end)) for start, end in entry["spans"])
    except (KeyError, TypeError, ValueError) as error:
        raise HyperDFlashConfigError(
            f"{where}: samples must hold tokens and spans of whole numbers ({error!r})."
        ) from error
    if not all(0 < start < end <= len(tokens) for start, end in spans):
        raise HyperDFlashConfigError(
            f"{where}: spans {list(spans)} do not lie inside {len(tokens)} tokens."
        )
    return Sample(tokens, spans)


def _list(record: Mapping[str, Any], name: str, where: str) -> list:
    value = record[name]
    if not isinstance(value, list) or not value:
        raise HyperDFlashConfigError(
            f"{where}: {name} must be a non-empty list, found {shown(value)}. Fix or remove "
            "this line."
        )
    return value


def _message(entry: Any, where: str) -> dict[str, str]:
    fields = entry if isinstance(entry, Mapping) else {}
    for role, content in (("role", "content"), ("from", "value")):
        if role in fields and content in fields:
            break
    else:
        raise HyperDFlashConfigError(
            f"{where}: every turn must have role and content (or from and value)."
        )
    if not isinstance(fields[role], str) or fields[role] not in _ROLES:
        raise HyperDFlashConfigError(
            f"{where}: role {fields[role]!r} is not one of {', '.join(_ROLES)}."
        )
    return {"role": _ROLES[fields[role]], "content": fields[content]}


def to_sample(tokenizer, messages: Messages, where: str = "a conversation") -> Sample | None:
    """Tokens of a whole conversation, its assistant answers (end tokens included) as spans.

    The template is rendered up to every answer and after it; what an answer adds is its span. That
    works with any template that only appends. None without an answer.

    Raises:
        HyperDFlashConfigError: the template rewrites earlier turns, or an answer adds no token.
    """
    spans: list[tuple[int, int]] = []
    tokens: list[int] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = render(tokenizer, messages[:i], prompt=True, where=where)
        after = render(tokenizer, messages[: i + 1], prompt=False, where=where)
        if not after.startswith(before):
            raise HyperDFlashConfigError(
                f"{where}: the chat template renders an answer differently once it is there, so "
                "its tokens cannot be told apart. Use a template that only appends."
            )
        start = tokenizer(before, add_special_tokens=False)["input_ids"]
        answer = tokenizer(after[len(before) :], add_special_tokens=False)["input_ids"]
        if tokens and start[: len(tokens)] != tokens:
            raise HyperDFlashConfigError(
                f"{where}: the chat template rewrites earlier turns (it may drop reasoning). "
                "Split the conversation into one line for each answer."
            )
        if not answer:
            raise HyperDFlashConfigError(
                f"{where}: the chat template yields no tokens for answer {len(spans) + 1}."
            )
        spans.append((len(start), len(start) + len(answer)))
        tokens = start + answer
    return Sample(tokens, tuple(spans)) if spans else None


@dataclass(frozen=True)
class Loaded:
    """Samples, and the ``file:line`` of each, of each conversation without an answer, and of each
    sample over the length limit.
    """

    samples: list[Sample]
    places: list[str]
    without_answer: list[str]
    too_long: list[str]

    def __str__(self) -> str:
        tokens = sum(sample.answer_tokens for sample in self.samples)
        return (
            f"{len(self.samples)} samples, {tokens} answer tokens; left out {len(self.too_long)} "
            f"over the length limit and {len(self.without_answer)} without an answer"
        )


def load_samples(paths: Iterable[str | Path], tokenizer, max_length: int) -> Loaded:
    """Samples of JSONL files, in order; conversations over ``max_length`` tokens are left out.

    Raises:
        HyperDFlashConfigError: a bad line, or nothing left to train on (and why).
    """
    loaded, paths = Loaded([], [], [], []), list(paths)
    for path in paths:
        for record, where in read_records(path):
            found = line_samples(tokenizer, record, where)
            if not found:
                loaded.without_answer.append(where)
            for sample in found:
                if len(sample.tokens) > max_length:
                    loaded.too_long.append(where)
                    continue
                loaded.samples.append(sample)
                loaded.places.append(where)
    if not loaded.samples:
        raise HyperDFlashConfigError(
            f"no samples in {', '.join(map(str, paths))} ({loaded}); raise max_length "
            f"({max_length}), or answer the prompts with the target first."
        )
    return loaded

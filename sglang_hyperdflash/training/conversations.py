"""Chat data to samples: several JSONL forms, the target's chat template, assistant-only masks.

Forms, told apart by their fields: ``{"messages": [{"role", "content"}]}``; ShareGPT's
``{"conversations": [{"from", "value"}]}`` (or, as in EagleChat, with role and content);
``{"instruction", "output"}`` (Evol-CodeAlpaca);
``{"turns": [...]}``, user turns without answers, which only regeneration can use. Lines of
``hyperdflash regenerate`` hold ``samples`` with the target's exact tokens, which are taken as they
are.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.samples import Sample

Messages = list[dict[str, str]]
_ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
HUB = "hub:"


def read_conversations(path: str | Path) -> Iterator[Messages]:
    """Conversations of a JSONL file, each a list of ``{"role", "content"}``.

    Raises:
        FileNotFoundError: no such file. HyperDFlashConfigError: a line in none of the forms, or a
            file without any; both name the line.
    """
    for line, where in read_lines(path):
        yield parse_conversation(line, where)


def read_lines(path: str | Path) -> Iterator[tuple[str, str]]:
    """Lines that are not blank, each with the words that name it in errors.

    ``hub:OWNER/NAME`` (``hub:OWNER/NAME:SPLIT``) streams a data set of the hub, a line for a row.
    """
    if str(path).startswith(HUB):
        yield from _hub_lines(str(path).removeprefix(HUB))
        return
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"data file {path} does not exist.")
    empty = True
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                empty = False
                yield line, f"{path}, line {number}"
    if empty:
        raise HyperDFlashConfigError(f"data file {path} is empty.")


def _hub_lines(name: str) -> Iterator[tuple[str, str]]:
    from datasets import load_dataset

    name, _, split = name.partition(":")
    try:
        rows = load_dataset(name, split=split or "train", streaming=True)
    except Exception as error:  # the hub client raises many kinds
        raise FileNotFoundError(f"data set {name} cannot be read from the hub: {error}") from error
    for number, row in enumerate(rows, 1):
        yield json.dumps(row, default=str), f"{HUB}{name}, row {number}"


def data_place(base: Path, name: str) -> Path | str:
    """A data file relative to ``base``, or a hub data set's name as it is."""
    return name if name.startswith(HUB) else base / name


def parse_conversation(line: str, where: str) -> Messages:
    """One line in any of the forms; ``where`` names it in errors."""
    return _messages(_record(line, where), where)


def _messages(record: Mapping[str, Any], where: str) -> Messages:
    if "messages" in record:
        messages = [_message(m, where) for m in _list(record, "messages", where)]
    elif "conversations" in record:
        messages = [_message(m, where) for m in _list(record, "conversations", where)]
    elif "instruction" in record and "output" in record:
        extra = record.get("input") or ""
        prompt = record["instruction"] + (f"\n{extra}" if extra else "")
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
    if not all(isinstance(m["content"], str) for m in messages):
        raise HyperDFlashConfigError(f"{where}: every message must be text.")
    return messages


def _record(line: str, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise HyperDFlashConfigError(f"{where} is not JSON: {error}.") from error
    if not isinstance(record, Mapping):
        raise HyperDFlashConfigError(f"{where} must be an object, found {type(record).__name__}.")
    return record


def line_samples(tokenizer, line: str, where: str) -> list[Sample]:
    """The samples of one line: regenerated tokens as they are, else its conversation's one."""
    record = _record(line, where)
    if "samples" in record:
        return [_regenerated(entry, where) for entry in record["samples"]]
    sample = to_sample(tokenizer, _messages(record, where), where)
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
        raise HyperDFlashConfigError(f"{where}: {name} must be a non-empty list.")
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
    if fields[role] not in _ROLES:
        raise HyperDFlashConfigError(
            f"{where}: role {fields[role]!r} is not one of {', '.join(_ROLES)}."
        )
    return {"role": _ROLES[fields[role]], "content": fields[content]}


def to_sample(tokenizer, messages: Messages, where: str = "a conversation") -> Sample | None:
    """Tokens of a whole conversation, its assistant answers (end tokens included) as spans.

    The template is rendered up to every answer and after it; what an answer adds is its span. That
    works with any template that only appends.

    Returns:
        None without an assistant message.

    Raises:
        HyperDFlashConfigError: the template rewrites earlier turns, or an answer adds no token.
    """
    spans: list[tuple[int, int]] = []
    tokens: list[int] = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = _render(tokenizer, messages[:i], prompt=True)
        after = _render(tokenizer, messages[: i + 1], prompt=False)
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
                f"{where}: the chat template yields no assistant tokens for answer "
                f"{len(spans) + 1}."
            )
        spans.append((len(start), len(start) + len(answer)))
        tokens = start + answer
    return Sample(tokens, tuple(spans)) if spans else None


@dataclass(frozen=True)
class Loaded:
    """Samples of some files and how many conversations were left out, by reason."""

    samples: list[Sample]
    without_answer: int
    too_long: int

    def __str__(self) -> str:
        tokens = sum(sample.answer_tokens for sample in self.samples)
        return (
            f"{len(self.samples)} samples, {tokens} answer tokens; left out {self.too_long} over "
            f"the length limit and {self.without_answer} without an answer"
        )


def load_samples(paths: Iterable[str | Path], tokenizer, max_length: int) -> Loaded:
    """Samples of JSONL files, in order; conversations over ``max_length`` tokens are left out.

    Raises:
        HyperDFlashConfigError: a bad line, or nothing left to train on (and why).
    """
    samples, without, long = [], 0, 0
    paths = list(paths)
    for path in paths:
        for line, where in read_lines(path):
            found = line_samples(tokenizer, line, where)
            without += not found
            fitting = [sample for sample in found if len(sample.tokens) <= max_length]
            long += len(found) - len(fitting)
            samples += fitting
    loaded = Loaded(samples, without, long)
    if not samples:
        raise HyperDFlashConfigError(
            f"no samples in {', '.join(map(str, paths))} ({loaded}); raise max_length "
            f"({max_length}), or answer the prompts with the target first."
        )
    return loaded


def _render(tokenizer, messages: Messages, *, prompt: bool) -> str:
    return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)

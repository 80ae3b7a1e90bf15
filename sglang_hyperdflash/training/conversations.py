"""Chat data to samples: several JSONL forms, the target's own encoding, the answers as spans.

Forms, told apart by their fields: ``{"messages": [{"role", "content"}]}``; ShareGPT's
``{"conversations": [{"from", "value"}]}`` (or, as in EagleChat, with role and content);
``{"instruction", "output"}`` (Evol-CodeAlpaca); ``{"turns": [...]}``, user turns without answers,
for ``hyperdflash regenerate``, whose own lines hold ``samples`` with the target's exact tokens.
The first two may have ``tools`` and ``chat_template_kwargs``, as a request to a server has.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hyperdflash.targets.chats import Chat, Chats, Message
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.fields import shown
from sglang_hyperdflash.tools.jsonl import read_lines
from sglang_hyperdflash.training.samples import Sample

_ROLES = {name: name for name in ("system", "developer", "user", "assistant", "tool")}
_ROLES |= {"human": "user", "gpt": "assistant"}
# What a message may hold besides its role and content.
_MORE = ("reasoning_content", "tool_calls", "tool_call_id", "name")
HUB = "hub:"


def read_conversations(path: str | Path) -> Iterator[tuple[Chat, str]]:
    """Conversations of a file, each with its place."""
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


def parse_conversation(record: Mapping[str, Any], where: str) -> Chat:
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
        if message["content"] is None and message.get("tool_calls"):
            continue
        if not isinstance(message["content"], str):
            raise HyperDFlashConfigError(
                f"{where}: every message must be text, found {shown(message['content'])} of the "
                f"{message['role']}. Fix or remove this line."
            )
    options = record.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise HyperDFlashConfigError(
            f"{where}: chat_template_kwargs must be an object, found {shown(options)}. Fix or "
            "remove this line."
        )
    return Chat(messages, _tools(record.get("tools"), where), options)


def _tools(given: Any, where: str) -> list[dict[str, Any]] | None:
    """The tools of a line; data sets of the hub hold them as a text of JSON."""
    try:
        tools = json.loads(given) if isinstance(given, str) and given else given
    except ValueError:
        tools = [given]
    if not tools:
        return None
    if not isinstance(tools, list) or not all(map(_is_tool, tools)):
        raise HyperDFlashConfigError(
            f"{where}: tools must be a list of objects with a function, as OpenAI's API has them, "
            f"found {shown(given)}. Fix or remove this line."
        )
    return [{**_given(tool), "function": _given(tool["function"])} for tool in tools]


def _is_tool(value: Any) -> bool:
    return isinstance(value, Mapping) and isinstance(value.get("function"), Mapping)


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without what a table of the hub fills with null."""
    return {name: value for name, value in fields.items() if value is not None}


def line_samples(chats: Chats, record: Mapping[str, Any], where: str) -> list[Sample]:
    """The samples of one line: regenerated tokens as they are, else its conversation's."""
    if "samples" in record:
        return [_regenerated(entry, where) for entry in _list(record, "samples", where)]
    return chat_samples(chats, parse_conversation(record, where), where)


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


def _message(entry: Any, where: str) -> Message:
    fields = entry if isinstance(entry, Mapping) else {}
    for role, content in (("role", "content"), ("from", "value")):
        if role in fields and (content in fields or fields.get("tool_calls")):
            break
    else:
        raise HyperDFlashConfigError(
            f"{where}: every turn must have role and content (or from and value)."
        )
    if not isinstance(fields[role], str) or fields[role] not in _ROLES:
        raise HyperDFlashConfigError(
            f"{where}: role {fields[role]!r} is not one of {', '.join(_ROLES)}."
        )
    message = {"role": _ROLES[fields[role]], "content": fields.get(content)}
    message |= {name: fields[name] for name in _MORE if fields.get(name) is not None}
    try:
        named = [call["function"]["name"] for call in message.get("tool_calls", ())]
    except (TypeError, KeyError):
        named = [None]
    if not all(isinstance(name, str) for name in named):
        raise HyperDFlashConfigError(
            f"{where}: every tool call must have a function with a name and arguments, found "
            f"{shown(message['tool_calls'])}. Fix or remove this line."
        )
    return message


def chat_samples(chats: Chats, chat: Chat, where: str) -> list[Sample]:
    """The samples of a whole conversation: see :func:`joined`. None of one without an answer.

    Unless its options say otherwise, the target thinks if an answer holds reasoning.

    Raises:
        HyperDFlashConfigError: the target's encoding refuses it, or an answer adds no token.
    """
    if any(message.get("reasoning_content") for message in chat.messages):
        chat = Chat(chat.messages, chat.tools, {"thinking": True, **chat.options})
    turns = []
    for i, message in enumerate(chat.messages):
        if message["role"] != "assistant":
            continue
        prompt = chats.prompt(chat.with_messages(chat.messages[:i]), where)
        answer = chats.answer(chat.with_messages(chat.messages[: i + 1]), where)
        if not answer:
            raise HyperDFlashConfigError(
                f"{where}: the target's encoding yields no tokens for answer {len(turns) + 1}."
            )
        turns.append((prompt, answer))
    return joined(turns)


def joined(turns: Iterable[tuple[list[int], list[int]]]) -> list[Sample]:
    """Samples of prompts and their answers, which become spans.

    A prompt that continues the tokens before it belongs to their sample: one sample for a
    conversation that only grows. Where earlier turns are rewritten (reasoning that is dropped,
    tokens that are not their text's usual ones), the served sequence is another one, and so is the
    sample.
    """
    samples: list[Sample] = []
    for prompt, answer in turns:
        tokens, start = prompt + answer, len(prompt)
        spans: tuple[tuple[int, int], ...] = ()
        if samples and prompt[: len(samples[-1].tokens)] == samples[-1].tokens:
            spans = samples.pop().spans
        samples.append(Sample(tokens, (*spans, (start, len(tokens)))))
    return samples


@dataclass(frozen=True)
class Loaded:
    """Samples, and the ``file:line`` of each, of each conversation without an answer, and of each
    sample whose first answer is over the length limit.
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


def load_samples(paths: Iterable[str | Path], chats: Chats, max_length: int) -> Loaded:
    """Samples of JSONL files, in order; answers that end after ``max_length`` tokens are left out.

    Raises:
        HyperDFlashConfigError: a bad line, or nothing left to train on (and why).
    """
    loaded, paths = Loaded([], [], [], []), list(paths)
    for path in paths:
        for record, where in read_records(path):
            found = line_samples(chats, record, where)
            if not found:
                loaded.without_answer.append(where)
            for sample in found:
                sample = sample.cut(max_length)
                if not sample.spans:
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

"""Chat data to samples: several forms of rows, the target's own encoding, the answers as spans.

docs/training.md lists the forms, told apart by their fields. What cannot be used raises ``BadRow``;
what is wrong with answers alone does not count where the target answers instead.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from sglang_hyperdflash.targets.chats import Chat, Chats, Message
from sglang_hyperdflash.tools.errors import BadRow, HyperDFlashConfigError
from sglang_hyperdflash.tools.fields import shown
from sglang_hyperdflash.training.rows import LeftOut, read_rows
from sglang_hyperdflash.training.samples import Sample

_ROLES = {name: name for name in ("system", "developer", "user", "assistant", "tool")}
_ROLES |= {"human": "user", "gpt": "assistant"}
# Names of one thing in different data sets; the first that a row has counts.
_LISTS = ("messages", "conversations", "conversation", "turns")
_ASKED, _ANSWERED = ("instruction", "prompt", "question"), ("output", "response", "answer")
_SYSTEM, _REASONING = ("system", "system_prompt"), ("reasoning_content", "reasoning", "thinking")
# What a message may hold besides its role, content and reasoning.
_MORE = ("tool_calls", "tool_call_id", "name")
_THOUGHT, _TAG = re.compile(r"\s*<think>(.*?)</think>\s*(.*)", re.DOTALL), re.compile("</?think>")


def parse_conversation(record: Mapping[str, Any], where: str) -> Chat:
    """One row's object in any of the forms, from its first user turn: earlier answers have no
    prompt. Raises ``BadRow``.
    """
    record = _given(record)  # a table of the hub has all columns in all rows
    asked, answered = _first(record, _ASKED), _first(record, _ANSWERED)
    if listed := _first(record, _LISTS):
        turns = _list(record, listed, where)
        turns = [{"role": "user", "content": t} for t in turns] if listed == "turns" else turns
    elif asked and answered:
        prompt, extra = record[asked], asked == "instruction" and record.get("input")
        prompt = f"{prompt}\n{extra}" if extra and isinstance(prompt, str) else prompt
        turns = [{"role": "user", "content": prompt}]
        turns.append({"role": "assistant", "content": record[answered]})
    else:
        forms = "messages, conversations, instruction and output, turns or another known form"
        raise BadRow(where, f"expected {forms}, found {', '.join(record) or 'nothing'}")
    messages = [_message(turn, where) for turn in turns]
    if system := record.get(_first(record, _SYSTEM) or ""):
        if messages[0]["role"] != "system":
            messages.insert(0, _message({"role": "system", "content": system}, where))
        if messages[0]["content"] != system:
            raise BadRow(where, "its system column and its first message differ")
    first = next((i for i, m in enumerate(messages) if m["role"] == "user"), None)
    if first is None:
        raise BadRow(where, "it has no turn of a user")
    before = [m for m in messages[:first] if m["role"] in ("system", "developer")]
    options = record.get("chat_template_kwargs") or {}
    if not isinstance(options, Mapping):
        raise BadRow(where, f"chat_template_kwargs must be an object, found {shown(options)}")
    tools = _tools(record.get("tools"), where)
    return Chat([*before, *messages[first:]], tools, options)


def _first(fields: Mapping[str, Any], names: Iterable[str]) -> str | None:
    return next((name for name in names if fields.get(name) is not None), None)


def _tools(given: Any, where: str) -> list[dict[str, Any]] | None:
    """The tools of a line; data sets of the hub hold them as a text of JSON."""
    try:
        tools = json.loads(given) if isinstance(given, str) and given else given
    except (ValueError, RecursionError):
        tools = [given]
    if not tools:
        return None
    if not _have_functions(tools):
        wanted = "a list of objects with a function, as OpenAI's API has them"
        raise BadRow(where, f"tools must be {wanted}, found {shown(given)}")
    return [{**_given(tool), "function": _given(tool["function"])} for tool in tools]


def _have_functions(entries: Any) -> bool:
    return isinstance(entries, list) and all(
        isinstance(entry, Mapping) and isinstance(entry.get("function"), Mapping)
        for entry in entries
    )


def _given(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Without what a table of the hub fills with null."""
    return {name: value for name, value in fields.items() if value is not None}


def line_samples(chats: Chats, record: Mapping[str, Any], where: str) -> list[Sample]:
    """The samples of one row: regenerated tokens as they are, else its conversation's."""
    if record.get("samples") is not None:
        entries = _list(record, "samples", where)
        return [_regenerated(entry, where, chats.vocab_size) for entry in entries]
    return chat_samples(chats, parse_conversation(record, where), where)


def _regenerated(entry: Any, where: str, vocab_size: int) -> Sample:
    """A sample that ``hyperdflash regenerate`` wrote, but for the spans of empty answers.

    Raises:
        HyperDFlashConfigError: it is damaged or of another target: the file is, not the row alone.
    """
    try:
        tokens = [int(token) for token in entry["tokens"]]
        spans = tuple((int(start), int(end)) for start, end in entry["spans"])
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise HyperDFlashConfigError(
            f"{where}: samples must hold tokens and spans of whole numbers ({error!r})."
        ) from error
    borders = [1, *chain(*spans), len(tokens)]
    if borders != sorted(borders) or not 0 <= min(tokens) <= max(tokens) < vocab_size:
        raise HyperDFlashConfigError(
            f"{where}: expected ids below {vocab_size}, the target's vocabulary, and spans inside "
            f"the tokens, one after another; found ids up to {max(tokens, default=0)}, "
            f"{len(tokens)} tokens and spans {list(spans)}. Regenerate this file with the target."
        )
    return Sample(tokens, tuple(span for span in spans if span[0] < span[1]))


def _list(record: Mapping[str, Any], name: str, where: str) -> list:
    value = record[name]
    if not isinstance(value, list) or not value:
        raise BadRow(where, f"{name} must be a non-empty list, found {shown(value)}")
    return value


def _message(entry: Any, where: str) -> Message:
    fields = entry if isinstance(entry, Mapping) else {}
    named = fields.get("role") is not None
    role, content = ("role", "content") if named else ("from", "value")
    if role not in fields or not (content in fields or fields.get("tool_calls")):
        raise BadRow(where, "every turn must have role and content (or from and value)")
    if not isinstance(fields[role], str) or fields[role] not in _ROLES:
        raise BadRow(where, f"role {shown(fields[role])} is not one of {', '.join(_ROLES)}")
    said, text = _ROLES[fields[role]], _joined(fields.get(content))
    message = {"role": said, "content": text}
    message |= {name: fields[name] for name in _MORE if fields.get(name) is not None}
    calls = message.get("tool_calls", [])
    if not isinstance(text, str) and not (text is None and (calls or said == "assistant")):
        raise BadRow(where, f"a message of the {said} must be text, found {shown(text)}")
    names = [c["function"].get("name") for c in calls] if _have_functions(calls) else [None]
    if not all(isinstance(name, str) for name in names):
        wanted = "a function with a name and arguments"
        raise BadRow(where, f"every tool call must have {wanted}, found {shown(calls)}")
    return _with_reasoning(message, fields, where) if said == "assistant" else message


def _joined(content: Any) -> Any:
    """The text of content in parts, as DeepSeek-V4's encoder joins them; other content as it is."""
    parts = content if isinstance(content, list) and content else [None]
    texts = [p.get("text") for p in parts if isinstance(p, Mapping) and p.get("type") == "text"]
    whole = len(texts) == len(parts) and all(isinstance(text, str) for text in texts)
    return "\n\n".join(texts) if whole else content


def _with_reasoning(message: Message, fields: Mapping[str, Any], where: str) -> Message:
    """Reasoning under any of its names, or in tags at the beginning, as ``reasoning_content``."""
    reasoning = fields.get(_first(fields, _REASONING) or "") or ""
    tagged = _THOUGHT.fullmatch(message["content"] or "")
    if tagged and not reasoning:
        reasoning, message["content"] = tagged[1].strip(), tagged[2]
    if not isinstance(reasoning, str):
        raise BadRow(where, f"reasoning must be text, found {shown(reasoning)}")
    return message | ({"reasoning_content": reasoning} if reasoning else {})


def check_answer(message: Message, where: str) -> None:
    """Refuse what no target can have said; raises ``BadRow``. ``regenerate`` replaces it."""
    if message["content"] is None and not message.get("tool_calls"):
        raise BadRow(where, "a message of the assistant must be text, found null")
    if _TAG.search(f"{message.get('reasoning_content')}{message['content']}"):
        raise BadRow(where, "an answer holds a <think> tag that does not enclose its beginning")


def chat_samples(chats: Chats, chat: Chat, where: str) -> list[Sample]:
    """The samples of a whole conversation: see :func:`joined`. None of one without an answer.

    Unless its options say otherwise, the target thinks if an answer holds reasoning.

    Raises:
        BadRow: the target's encoding refuses it or has ids past the target's vocabulary, or an
            answer has no text, a stray tag or no token.
    """
    if any(message.get("reasoning_content") for message in chat.messages):
        chat = Chat(chat.messages, chat.tools, {"thinking": True, **chat.options})
    turns = []
    for i, message in enumerate(chat.messages):
        if message["role"] != "assistant":
            continue
        check_answer(message, where)
        prompt = chats.prompt(chat.with_messages(chat.messages[:i]), where)
        answer = chats.answer(chat.with_messages(chat.messages[: i + 1]), where)
        if not answer:
            number = len(turns) + 1
            raise BadRow(where, f"the target's encoding yields no tokens for answer {number}")
        largest = max(prompt + answer)
        if largest >= chats.vocab_size:
            reason = f"its tokenizer yields id {largest}, past the target's {chats.vocab_size}"
            raise BadRow(where, reason)
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
    """Samples, and the place (``file:line``) and index of each one's row."""

    samples: list[Sample]
    places: list[str]
    rows: list[int]

    @classmethod
    def of(cls, parts: Iterable[Loaded]) -> Loaded:
        """Those of several sources."""
        every = [(part.samples, part.places, part.rows) for part in parts]
        return cls(*(list(chain.from_iterable(each)) for each in zip(*every, strict=True)))

    def __str__(self) -> str:
        tokens = sum(sample.answer_tokens for sample in self.samples)
        return f"{len(self.samples)} samples, {tokens} answer tokens"


def load_samples(
    paths: Sequence[str | Path], chats: Chats, max_length: int, left_out: LeftOut | None = None
) -> Loaded:
    """Samples of data, in order; answers that end after ``max_length`` tokens are left out.

    Args:
        left_out: takes the rows without an answer that can be used.

    Raises:
        HyperDFlashConfigError: nothing is left to train on, or a row is of another target.
    """

    def use(index: int, record: Mapping[str, Any], where: str) -> list[tuple[Sample, str, int]]:
        samples = [s for s in line_samples(chats, record, where) if s.spans]
        if not samples:
            raise BadRow(where, "it has no answer")
        samples = [sample for s in samples if (sample := s.cut(max_length)).spans]
        if not samples:
            raise BadRow(where, f"its first answer ends after {max_length} tokens")
        return [(sample, where, index) for sample in samples]

    left_out = left_out or LeftOut()
    here = LeftOut(left_out.strict)
    used = list(chain.from_iterable(here.usable(read_rows(paths), use)))
    if not used:
        advice = f"Raise max_length ({max_length}), or answer the prompts with the target first."
        raise here.nothing_usable(", ".join(map(str, paths)), advice)
    left_out.read, left_out.entries = left_out.read + here.read, left_out.entries | here.entries
    return Loaded(*map(list, zip(*used, strict=True)))

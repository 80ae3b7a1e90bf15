"""Commands that answer prompts: how a server is asked, and an output that is its own resume state.

Neither the prompts nor the answers are kept in memory. Refused prompts are listed in
``OUTPUT.skipped.jsonl``; the next run asks them again, but for conversations that have answers from
before the refused turn: these keep them, with the reason.
"""

from __future__ import annotations

import asyncio
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sglang_hyperdflash.commands.pool import Pool, Refused
from sglang_hyperdflash.targets.chats import Chat, ChatRefused, Chats, Message, arguments_of
from sglang_hyperdflash.tools.atomic import write_text
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.jsonl import ResumableWriter
from sglang_hyperdflash.tools.ownership import NotOurs, check, claim

SHOWN = 5  # printed lines of a list; the rest is in its file


@dataclass(frozen=True)
class Conversation:
    """What is asked.

    Attributes:
        index: its number in the input. digest: a hash of it. where: its ``file:line``.
        steps: lists of messages; after each of them the target answers. A step of tool results
            begins with the message that called the tools.
        text: a raw prompt instead of messages; ``steps`` is then one empty list.
        chat: its tools and options, without messages.
    """

    index: int
    digest: str
    where: str
    steps: list[list[Message]]
    text: str | None = None
    chat: Chat = field(default_factory=lambda: Chat([]))


@dataclass(frozen=True)
class Asker:
    """Asks servers whole conversations.

    Attributes:
        limit: the servers' smallest ``max_req_input_len``: the most tokens of a prompt, plus one;
            it leaves out what SGLang reserves of the context and of the K/V pool.
        sampling: SGLang's parameters; ``max_new_tokens`` is cut to what ``limit`` leaves.
        options: those of every conversation that does not have its own.
    """

    pool: Pool
    limit: int
    chats: Chats
    sampling: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)

    async def converse(
        self, asked: Conversation
    ) -> tuple[list[Message], list[dict[str, Any]], str | None]:
        """Ask the steps in order, each after the answers before it.

        Returns:
            The messages with their answers, the server's replies, each with its ``input_ids``, and
            why the conversation ends early, or None.
        """
        chat = Chat([], asked.chat.tools, {**self.options, **asked.chat.options})
        replies: list[dict[str, Any]] = []
        for number, step in enumerate(asked.steps, 1):
            following = chat.with_messages(_continued(chat.messages, step))
            try:
                tokens = self._tokens(asked, following)
                reply = await self._generate(tokens)
            except (Refused, ChatRefused) as error:
                turn = f"turn {number}: " if asked.text is None else ""
                return chat.messages, replies, f"{turn}{getattr(error, 'reason', error)}"
            if asked.text is None:
                answer = self.chats.message(following, reply)
                chat = chat.with_messages([*following.messages, answer])
            replies.append(reply | {"input_ids": tokens})
        return chat.messages, replies, None if asked.steps else "it has no turn of a user"

    def _tokens(self, asked: Conversation, chat: Chat) -> list[int]:
        """The prompt of the next answer."""
        if asked.text is not None:
            return self.chats.tokenizer.encode(asked.text, add_special_tokens=True)
        return self.chats.prompt(chat, asked.where)

    async def _generate(self, tokens: list[int]) -> dict[str, Any]:
        room = self.limit - len(tokens)
        if room <= 0:
            raise Refused(
                f"the prompt has {len(tokens)} tokens, the server accepts {self.limit - 1}"
            )
        new = min(self.sampling["max_new_tokens"], room)
        sampling = {**self.sampling, "max_new_tokens": new}
        return await self.pool.ask(input_ids=tokens, sampling_params=sampling)


def _continued(messages: list[Message], step: list[Message]) -> list[Message]:
    """The messages of the next prompt.

    The results of tools belong to the calls of the data set. Where the target has made the same
    calls its own message stays, else theirs takes its place.
    """
    if not (messages and step and step[0]["role"] == "assistant"):
        return [*messages, *step]
    called = step[0].get("tool_calls") or []
    if called and _calls(messages[-1]) == _calls(step[0]):
        return [*messages[:-1], messages[-1] | {"tool_calls": called}, *step[1:]]
    return [*messages[:-1], *step]


def _calls(message: Message) -> list[tuple[str, Any]]:
    calls = message.get("tool_calls") or ()
    return [(call["function"]["name"], arguments_of(call)) for call in calls]


def write_skipped(path: Path, entries: Sequence[Mapping[str, Any]], word: str) -> None:
    """Print the first of what was left out and write the whole list; raises ``WriteFailed``.

    Args:
        entries: with ``where`` and ``reason``. word: what happened to them, "refused".
    """
    if not entries:
        path.unlink(missing_ok=True)
        return
    for entry in entries[:SHOWN]:
        print(f"  {word} {entry['where']}: {entry['reason']}")
    write_text(path, "".join(json.dumps(entry) + "\n" for entry in entries))
    print(f"{len(entries)} {word}: listed in {path}")


@dataclass(frozen=True)
class Answers:
    """An output file that this run holds.

    Attributes:
        asked: all prompts, read again by every iteration. count: how many.
        done: the indices of those that the file answers. served: the names of the models that
            answered them.
        ended: of those the ones that end early, as listed.
        noun: what the prompts are called, ``prompts``.
    """

    path: Path
    writer: ResumableWriter
    asked: Iterable[Conversation]
    count: int
    done: frozenset[int]
    served: frozenset[str]
    ended: tuple[dict[str, Any], ...]
    noun: str

    @property
    def left(self) -> int:
        """How many prompts have no answer."""
        return self.count - len(self.done)

    def waiting(self) -> Iterator[Conversation]:
        """The prompts without an answer, read one by one."""
        return (one for one in self.asked if one.index not in self.done)

    async def add_all(
        self,
        asker: Asker,
        fields: Callable[[list[Message], list[dict[str, Any]]], dict[str, Any]],
        concurrency: int,
    ) -> int:
        """Keep ``concurrency`` conversations in flight; write each record as it comes.

        Args:
            fields: of a record, besides ``index`` and ``digest``, from the messages and the
                server's replies. One that ends early has the reason as ``refused``.

        Returns:
            The number of records written.

        Raises:
            HyperDFlashConfigError: everything was refused.
        """
        queue, written, refused = self.waiting(), 0, list(self.ended)
        done = len(self.done)
        bar = tqdm(total=self.count, initial=done, unit="prompt", dynamic_ncols=True)

        async def worker() -> None:
            nonlocal written
            for one in queue:
                messages, replies, reason = await asker.converse(one)
                record = {"index": one.index, "digest": one.digest}
                if reason is not None:
                    refused.append(record | {"where": one.where, "reason": reason})
                    record |= {"refused": reason, "where": one.where}
                if replies:
                    self.writer.append(record | fields(messages, replies))
                    written += 1
                bar.update(1)

        with bar:
            async with asker.pool:
                await asyncio.gather(*(worker() for _ in range(min(concurrency, self.left))))
        if refused and not done + written:
            raise HyperDFlashConfigError(
                f"the target refused all {self.noun}: {refused[0]['where']}: "
                f"{refused[0]['reason']}. Fix or shorten them, or give a longer context."
            )
        write_skipped(skipped_path(self.path), refused, "refused")
        return written


def skipped_path(output: Path) -> Path:
    """The path of the list of refused prompts."""
    return output.with_name(f"{output.stem}.skipped.jsonl")


@contextmanager
def hold_answers(
    output: Path, kind: str, settings: Mapping[str, Any], asked: Iterable[Conversation], noun: str
) -> Iterator[Answers]:
    """Hold an output file whose records have ``index`` and ``digest``; print how many are done.

    The prompt of a last line that a kill cut is asked again.

    Args:
        settings: everything that affects an answer. asked: numbered from 0, in order; iterated
            more than once.

    Raises:
        NotOurs: the file is something else, or answers with other settings. InUse: another run
            writes it. HyperDFlashConfigError: it answers another input, or is damaged.
        JsonlError: a line inside it is damaged.
    """
    digests = array("Q", (int(one.digest, 16) for one in asked))
    listed = skipped_path(output)
    if check(output, kind, settings, is_file=True) is None and listed.exists():
        raise NotOurs(
            f"{listed} is there, but no run of these settings in {output}: it is not this run's "
            "list. Nothing was written. Choose another --output, or remove it."
        )
    done: set[int] = set()
    served: set[str] = set()
    ended: list[dict[str, Any]] = []

    def see(record: dict[str, Any]) -> None:
        index, digest = record.get("index"), record.get("digest")
        if not isinstance(index, int) or index < 0 or not _is_of(digests, index, digest):
            raise HyperDFlashConfigError(
                f"--output {output} holds answers to another input, or is damaged (index "
                f"{index}). Choose another --output, or remove {output} and run again."
            )
        if index < len(digests):
            done.add(index)
            if "refused" in record:
                shown = {"where": record.get("where"), "reason": record["refused"]}
                ended.append({"index": index, "digest": digest} | shown)
        served.add(record.get("served", ""))

    with claim(output, kind, settings, is_file=True), ResumableWriter(output, see) as writer:
        if writer.torn:
            print(f"{output}: dropped line {writer.torn}, cut by a kill; its prompt is asked again")
        print(f"{len(digests)} {noun}, {len(done)} already answered in {output}")
        held = frozenset(done), frozenset(served - {""}), tuple(ended)
        yield Answers(output, writer, asked, len(digests), *held, noun)


def _is_of(digests: array[int], index: int, digest: Any) -> bool:
    """Whether a record answers the prompt of its index; beyond ``--limit`` any may."""
    try:
        return index >= len(digests) or digests[index] == int(digest, 16)
    except (TypeError, ValueError):
        return False

"""Answers of running servers to prompts, and an output file that holds the state of its run.

Neither the prompts nor the answers are kept in memory. Rows that cannot be used and refused prompts
are listed in ``OUTPUT.left_out.jsonl``. The next run asks the refused prompts again, except
conversations with answers from before the refused turn: these keep their answers and the reason.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from tqdm import tqdm

from sglang_hyperdflash.commands.pool import Pool, Refused
from sglang_hyperdflash.targets.chats import Chat, Chats, Message, arguments_of
from sglang_hyperdflash.tools.errors import BadRow, HyperDFlashConfigError
from sglang_hyperdflash.tools.jsonl import ResumableWriter
from sglang_hyperdflash.tools.ownership import NotOurs, claim
from sglang_hyperdflash.training.rows import LeftOut, read_rows


@dataclass(frozen=True)
class Conversation:
    """The turns of one row that the target answers.

    Attributes:
        index: the row's number in the input.
        digest: a hash of the row, 16 hex digits.
        where: the row's ``file:line``.
        steps: lists of messages; the target answers after each of them. A step with tool results
            begins with the message that called the tools.
        text: a raw prompt instead of messages; ``steps`` is then one empty list.
        chat: the tools and options, without messages.
    """

    index: int
    digest: str
    where: str
    steps: list[list[Message]]
    text: str | None = None
    chat: Chat = field(default_factory=lambda: Chat([]))


@dataclass(frozen=True)
class Prompts:
    """Conversations of some data, read from disk each time.

    Attributes:
        noun: the plural that messages call them.
        parse: makes a conversation of a row; see :meth:`LeftOut.usable`.
        limit: the largest number of rows, or None.
        strict: whether a row that cannot be used ends the command.
    """

    noun: str
    sources: Sequence[str | Path]
    parse: Callable[[int, dict[str, Any], str], Conversation]
    limit: int | None
    strict: bool

    def read(self, left_out: LeftOut) -> Iterator[Conversation]:
        """Yield the usable conversations in order; their indices skip rows that are left out."""
        return left_out.usable(islice(read_rows(self.sources), self.limit), self.parse)


@dataclass(frozen=True)
class Asker:
    """Has servers answer whole conversations.

    Attributes:
        limit: the servers' smallest ``max_req_input_len``: the most tokens of a prompt, plus one.
            What SGLang reserves of the context and of the K/V pool is already subtracted.
        sampling: SGLang's parameters; ``max_new_tokens`` is cut to what ``limit`` leaves.
        options: the chat options of conversations that do not have their own.
        finished_only: whether an answer that is cut by length is emptied and ends its conversation.
        cut: the number of answers that are cut by length (True) and that are not (False).
    """

    pool: Pool
    limit: int
    chats: Chats
    sampling: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    finished_only: bool = False
    cut: Counter[bool] = field(default_factory=Counter)

    async def converse(
        self, conversation: Conversation
    ) -> tuple[list[Message], list[dict[str, Any]], str | None]:
        """Ask the steps in order, each after the answers to the steps before it.

        Returns:
            The messages with their answers, the server's replies, each with its ``input_ids``, and
            why the conversation ends early, or None.
        """
        options = {**self.options, **conversation.chat.options}
        chat = Chat([], conversation.chat.tools, options)
        replies: list[dict[str, Any]] = []
        for number, step in enumerate(conversation.steps, 1):
            turn = f"turn {number}: " if conversation.text is None else ""
            prompt = chat.with_messages(_continued(chat.messages, step))
            try:
                if conversation.text is None:
                    tokens = self.chats.prompt(prompt, conversation.where)
                else:
                    tokens = self.chats.tokenizer.encode(conversation.text, add_special_tokens=True)
                reply = await self._generate(tokens)
            except (Refused, BadRow) as error:
                return chat.messages, replies, f"{turn}{getattr(error, 'reason', error)}"
            is_cut = reply["meta_info"]["finish_reason"]["type"] == "length"
            self.cut[is_cut] += 1
            if is_cut and self.finished_only:
                replies.append(reply | {"input_ids": tokens, "output_ids": [], "text": ""})
                return chat.messages, replies, f"{turn}the answer is cut by length"
            if conversation.text is None:
                chat = chat.with_messages([*prompt.messages, self.chats.message(prompt, reply)])
            replies.append(reply | {"input_ids": tokens})
        return chat.messages, replies, None

    async def _generate(self, tokens: list[int]) -> dict[str, Any]:
        room = self.limit - len(tokens)
        if room <= 0:
            raise Refused(
                f"the prompt has {len(tokens)} tokens, the server accepts {self.limit - 1}"
            )
        max_new_tokens = min(self.sampling["max_new_tokens"], room)
        sampling = {**self.sampling, "max_new_tokens": max_new_tokens}
        return await self.pool.ask(input_ids=tokens, sampling_params=sampling)


def _continued(messages: list[Message], step: list[Message]) -> list[Message]:
    """Return the messages of the next prompt.

    Tool results answer the calls of the data set. If the target has made the same calls, its own
    message stays; otherwise the data set's message replaces it.
    """
    if not (messages and step and step[0]["role"] == "assistant"):
        return [*messages, *step]
    calls = step[0].get("tool_calls") or []
    if calls and _calls(messages[-1]) == _calls(step[0]):
        return [*messages[:-1], messages[-1] | {"tool_calls": calls}, *step[1:]]
    return [*messages[:-1], *step]


def _calls(message: Message) -> list[tuple[str, Any]]:
    calls = message.get("tool_calls") or ()
    return [(call["function"]["name"], arguments_of(call)) for call in calls]


@dataclass(frozen=True)
class Answers:
    """An output file that this run holds.

    Attributes:
        writer: appends records to the file.
        count: the number of usable prompts.
        done: the indices of the prompts that the file answers.
        served: the names of the models that answered them.
        left_out: rows that cannot be used, and prompts that are refused or end early.
        digests: the digests of the usable prompts by index, 0 where a row is left out.
    """

    writer: ResumableWriter
    prompts: Prompts
    count: int
    done: set[int]
    served: set[str]
    left_out: LeftOut
    digests: array[int]

    @property
    def left(self) -> int:
        """The number of prompts without an answer."""
        return self.count - len(self.done)

    def waiting(self) -> Iterator[Conversation]:
        """Yield the prompts without an answer; raise ``HyperDFlashConfigError`` if one changed."""
        for conversation in self.prompts.read(LeftOut()):
            if not _matches(self.digests, conversation.index, conversation.digest):
                raise HyperDFlashConfigError(
                    f"{conversation.where} has changed since this run began."
                )
            if conversation.index not in self.done:
                yield conversation

    async def add_all(
        self,
        asker: Asker,
        fields: Callable[[list[Message], list[dict[str, Any]]], dict[str, Any]],
        concurrency: int,
    ) -> int:
        """Keep ``concurrency`` conversations in flight; write each record when it is complete.

        Args:
            fields: makes a record's fields, besides ``index`` and ``digest``, from the messages and
                the server's replies. A conversation that ends early has the reason as ``refused``.

        Returns:
            The number of written records.

        Raises:
            HyperDFlashConfigError: every prompt was refused.
        """
        queue, written = self.waiting(), 0
        done = len(self.done)
        bar = tqdm(total=self.count, initial=done, unit="prompt", dynamic_ncols=True)

        async def worker() -> None:
            nonlocal written
            for conversation in queue:
                messages, replies, reason = await asker.converse(conversation)
                record = {"index": conversation.index, "digest": conversation.digest}
                if reason is not None:
                    self.left_out.add(conversation.index, conversation.where, reason)
                    record |= {"refused": reason, "where": conversation.where}
                if replies:
                    self.writer.append(record | fields(messages, replies))
                    written += 1
                bar.update(1)

        with bar:
            async with asker.pool:
                await asyncio.gather(*(worker() for _ in range(min(concurrency, self.left))))
        if not done + written:
            advice = "Fix or shorten them, or give a longer context."
            raise self.left_out.nothing_usable(f"the {self.prompts.noun}", advice)
        if asker.cut[True]:
            print(f"{asker.cut[True]} of {asker.cut.total()} answers are cut by length")
        return written


@contextmanager
def hold_answers(
    output: Path, kind: str, settings: Mapping[str, Any], prompts: Prompts
) -> Iterator[Answers]:
    """Hold an output file whose records have ``index`` and ``digest``; print how many are done.

    A last line that a kill cut is dropped, and its prompt is asked again. What is left out is
    reported at the end.

    Args:
        settings: everything that affects an answer.

    Raises:
        NotOurs: the file is something else, or holds answers with other settings.
        InUse: another run writes the file.
        HyperDFlashConfigError: the file answers another input or is damaged, or no prompt is
            usable.
    """
    left_out, digests, count = LeftOut(prompts.strict), array("Q"), 0
    for conversation in prompts.read(left_out):
        digests.extend([0] * (conversation.index - len(digests)))
        digests.append(int(conversation.digest, 16))
        count += 1
    if not count:
        raise left_out.nothing_usable("--input", "docs/training.md lists what is accepted.")
    listed = output.with_name(f"{output.stem}.left_out.jsonl")
    if not LeftOut.wrote(listed):
        raise NotOurs(
            f"{listed} is where a run into {output} lists what it leaves out, but not such a list. "
            "Nothing was written. Choose another --output, or remove it."
        )
    done, served = set[int](), set[str]()

    def see(record: dict[str, Any]) -> None:
        index, digest = record.get("index"), record.get("digest")
        if not isinstance(index, int) or index < 0 or not _matches(digests, index, digest):
            raise HyperDFlashConfigError(
                f"--output {output} holds answers to another input, or is damaged (index "
                f"{index}). Choose another --output, or remove {output} and run again."
            )
        if index < len(digests):
            done.add(index)
            if "refused" in record:
                left_out.add(index, str(record.get("where")), str(record["refused"]))
        if record.get("served"):
            served.add(record["served"])

    with claim(output, kind, settings, is_file=True), ResumableWriter(output, see) as writer:
        if writer.torn:
            print(f"{output}: dropped line {writer.torn}, cut by a kill; its prompt is asked again")
        print(f"{count} {prompts.noun}, {len(done)} already answered in {output}")
        try:
            yield Answers(writer, prompts, count, done, served, left_out, digests)
        finally:
            left_out.report(listed)


def _matches(digests: array[int], index: int, digest: Any) -> bool:
    """Return whether a digest is that of the prompt at ``index``; beyond ``--limit`` any is."""
    return index >= len(digests) or f"{digests[index]:016x}" == digest

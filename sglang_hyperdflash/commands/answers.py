"""Commands that answer prompts: how a server is asked, and an output that is its own resume state.

Neither the prompts nor the answers are kept in memory. Rows that cannot be used and refused prompts
are listed in ``OUTPUT.left_out.jsonl``; the next run asks the refused ones again, but for
conversations that have answers from before the refused turn: these keep them, with the reason.
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
class Prompts:
    """Conversations of some data, read again each time, so that none is kept in memory.

    Attributes:
        noun: what they are called. parse: makes one of a row; see :meth:`LeftOut.usable`.
        limit: the most rows, or None. strict: no row may be left out.
    """

    noun: str
    sources: Sequence[str | Path]
    parse: Callable[[int, dict[str, Any], str], Conversation]
    limit: int | None
    strict: bool

    def read(self, left_out: LeftOut) -> Iterator[Conversation]:
        """The usable ones in order; their indices have gaps where rows are left out."""
        return left_out.usable(islice(read_rows(self.sources), self.limit), self.parse)


@dataclass(frozen=True)
class Asker:
    """Asks servers whole conversations.

    Attributes:
        limit: the servers' smallest ``max_req_input_len``: the most tokens of a prompt, plus one;
            it leaves out what SGLang reserves of the context and of the K/V pool.
        sampling: SGLang's parameters; ``max_new_tokens`` is cut to what ``limit`` leaves.
        options: those of every conversation that does not have its own.
        finished_only: an answer that is cut by length is emptied and ends its conversation.
        cut: how many answers are cut, and how many are not.
    """

    pool: Pool
    limit: int
    chats: Chats
    sampling: Mapping[str, Any]
    options: Mapping[str, Any] = field(default_factory=dict)
    finished_only: bool = False
    cut: Counter[bool] = field(default_factory=Counter)

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
            turn = f"turn {number}: " if asked.text is None else ""
            following = chat.with_messages(_continued(chat.messages, step))
            try:
                tokens = self._tokens(asked, following)
                reply = await self._generate(tokens)
            except (Refused, BadRow) as error:
                return chat.messages, replies, f"{turn}{getattr(error, 'reason', error)}"
            is_cut = reply["meta_info"]["finish_reason"]["type"] == "length"
            self.cut[is_cut] += 1
            if is_cut and self.finished_only:
                replies.append(reply | {"input_ids": tokens, "output_ids": [], "text": ""})
                return chat.messages, replies, f"{turn}the answer is cut by length"
            if asked.text is None:
                answer = self.chats.message(following, reply)
                chat = chat.with_messages([*following.messages, answer])
            replies.append(reply | {"input_ids": tokens})
        return chat.messages, replies, None

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


@dataclass(frozen=True)
class Answers:
    """An output file that this run holds.

    Attributes:
        count: of usable prompts.
        done: the indices of those that the file answers. served: the names of the models that
            answered them.
        left_out: rows that cannot be used, and prompts that are refused or end early.
        digests: of the usable prompts, by index.
    """

    path: Path
    writer: ResumableWriter
    prompts: Prompts
    count: int
    done: frozenset[int]
    served: frozenset[str]
    left_out: LeftOut
    digests: array[int]

    @property
    def left(self) -> int:
        """How many prompts have no answer."""
        return self.count - len(self.done)

    def waiting(self) -> Iterator[Conversation]:
        """The prompts without an answer, read one by one; raises where the input has changed."""
        for one in self.prompts.read(LeftOut()):
            if not _is_of(self.digests, one.index, one.digest):
                raise HyperDFlashConfigError(f"{one.where} has changed since this run began.")
            if one.index not in self.done:
                yield one

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
        queue, written = self.waiting(), 0
        done = len(self.done)
        bar = tqdm(total=self.count, initial=done, unit="prompt", dynamic_ncols=True)

        async def worker() -> None:
            nonlocal written
            for one in queue:
                messages, replies, reason = await asker.converse(one)
                record = {"index": one.index, "digest": one.digest}
                if reason is not None:
                    self.left_out.add(one.index, one.where, reason)
                    record |= {"refused": reason, "where": one.where}
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

    The prompt of a last line that a kill cut is asked again. At the end comes the report of what is
    left out. ``settings`` are everything that affects an answer.

    Raises:
        NotOurs: the file is something else, or answers with other settings. InUse: another run
            writes it. HyperDFlashConfigError: it answers another input, or is damaged; or no
            prompt is usable.
    """
    left_out, digests, count = LeftOut(prompts.strict), array("Q"), 0
    for one in prompts.read(left_out):
        digests.extend([0] * (one.index - len(digests)))
        digests.append(int(one.digest, 16))
        count += 1
    if not count:
        raise left_out.nothing_usable("--input", "docs/training.md lists what is accepted.")
    listed = output.with_name(f"{output.stem}.left_out.jsonl")
    if not LeftOut.wrote(listed):
        raise NotOurs(
            f"{listed} is where a run into {output} lists what it leaves out, but not such a list. "
            "Nothing was written. Choose another --output, or remove it."
        )
    done: set[int] = set()
    served: set[str] = set()

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
                left_out.add(index, str(record.get("where")), str(record["refused"]))
        served.add(record.get("served", ""))

    with claim(output, kind, settings, is_file=True), ResumableWriter(output, see) as writer:
        if writer.torn:
            print(f"{output}: dropped line {writer.torn}, cut by a kill; its prompt is asked again")
        print(f"{count} {prompts.noun}, {len(done)} already answered in {output}")
        held = frozenset(done), frozenset(served - {""}), left_out, digests
        try:
            yield Answers(output, writer, prompts, count, *held)
        finally:
            left_out.report(listed)


def _is_of(digests: array[int], index: int, digest: Any) -> bool:
    """Whether a record answers the prompt of its index; beyond ``--limit`` any may."""
    try:
        return index >= len(digests) or digests[index] == int(digest, 16)
    except (TypeError, ValueError):
        return False

"""Commands that answer prompts: conversations, and an output file that is its own resume state.

The prompts that the target refused are listed in a second file (:class:`Skipped`).
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hyperdflash.tools.chat_template import TemplateRefused
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.jsonl import JsonlError, ResumableWriter, read_lines
from sglang_hyperdflash.tools.ownership import NotOurs, check, claim
from sglang_hyperdflash.training.conversations import Messages

SHOWN = 5  # printed lines of a list; the rest is in its file
ENTRY = {"index", "digest", "where", "reason", "answered"}  # of the list of refused prompts


@dataclass(frozen=True)
class Conversation:
    """What is asked.

    Attributes:
        index: its number in the input. digest: a hash of it. where: its ``file:line``.
        steps: lists of messages; after each of them the target answers.
        text: a raw prompt instead of messages; ``steps`` is then one empty list.
    """

    index: int
    digest: str
    where: str
    steps: list[Messages]
    text: str | None = None


class Refused(Exception):
    """The target refuses a prompt; the text gives the reason."""


def sampling_of(args: argparse.Namespace, *more: str) -> dict[str, Any]:
    """SGLang's sampling parameters, checked once instead of for each prompt.

    Args:
        args: of a command line with ``--concurrency``. more: parameters besides the usual four.

    Raises:
        HyperDFlashConfigError: a number out of range.
    """
    names = ("temperature", "top_p", "top_k", "max_new_tokens", *more)
    sampling = {name: getattr(args, name) for name in names}
    if args.concurrency < 1 or args.max_new_tokens < 1:
        raise HyperDFlashConfigError("--concurrency and --max-new-tokens must be at least 1.")
    ranges = {
        "temperature": (0 <= args.temperature < math.inf, "a number of at least 0"),
        "top_p": (0 < args.top_p <= 1, "above 0 and at most 1"),
        "top_k": (args.top_k == -1 or args.top_k >= 1, "-1 or at least 1"),
        "min_p": (0 <= sampling.get("min_p", 0) <= 1, "from 0 to 1"),
    }
    for name, (holds, expected) in ranges.items():
        if not holds:
            raise HyperDFlashConfigError(
                f"--{name.replace('_', '-')} must be {expected}, found {sampling[name]}."
            )
    return sampling


def room_for(tokens: int, limit: int) -> int:
    """The most tokens that an answer to a prompt may have.

    Args:
        tokens: of the prompt. limit: ``max_req_input_len`` of SGLang's server info, which leaves
            out what SGLang reserves of the context and of the K/V pool.

    Raises:
        Refused: there is no room for an answer.
    """
    if tokens >= limit:
        raise Refused(f"the prompt has {tokens} tokens, the server accepts {limit - 1}")
    return limit - tokens


def skipped_path(output: Path) -> Path:
    """The path of the list of refused prompts."""
    return output.with_name(f"{output.stem}.skipped.jsonl")


class Skipped:
    """The list of refused prompts of an output file that this run holds.

    Attributes:
        found: the entries, by the index of their prompt.
    """

    def __init__(self, output: Path, digests: Mapping[int, str]) -> None:
        self.path = skipped_path(output)
        self.writer: ResumableWriter | None = None
        self.found: dict[int, dict[str, Any]] = {}
        self.new: list[dict[str, Any]] = []
        if self.path.exists():
            self.writer = ResumableWriter(self.path)
            entries = [entry for entry in self.writer.records if entry.keys() == ENTRY]
            self.found = {e["index"]: e for e in entries if digests.get(e["index"]) == e["digest"]}

    @property
    def unanswered(self) -> set[int]:
        """Prompts without a single answered turn in the output."""
        return {index for index, entry in self.found.items() if not entry["answered"]}

    def forget(self) -> None:
        """Drop the entries without an answer, so that they are asked again."""
        kept = [entry for entry in self.found.values() if entry["answered"]]
        self.found = {}
        if self.writer is not None:
            self.writer.close()
            self.writer = None
            self.path.unlink()
        for entry in kept:
            self._write(entry)

    def add(self, asked: Conversation, reason: str, answered: int) -> None:
        """List a prompt, of which ``answered`` turns are in the output."""
        entry = {"index": asked.index, "digest": asked.digest, "where": asked.where}
        entry |= {"reason": reason, "answered": answered}
        self.new.append(entry)
        if asked.index not in self.found:
            self._write(entry)

    def _write(self, entry: dict[str, Any]) -> None:
        if self.writer is None:
            self.writer = ResumableWriter(self.path)
        self.writer.append(entry)
        self.found[entry["index"]] = entry

    def say(self, noun: str, answered: int) -> None:
        """Print the prompts refused in this run.

        Args:
            noun: ``conversations``. answered: how many the output holds.

        Raises:
            HyperDFlashConfigError: everything was refused.
        """
        for entry in self.new[:SHOWN]:
            print(f"  refused {entry['where']}: {entry['reason']}")
        if self.new:
            cut = sum(entry["answered"] > 0 for entry in self.new)
            print(
                f"{len(self.new)} {noun} refused ({cut} after their first answers): listed in "
                f"{self.path}; --retry-skipped asks them again"
            )
        if self.new and not answered:
            raise HyperDFlashConfigError(
                f"the target refused all {noun}: {self.new[0]['where']}: {self.new[0]['reason']}. "
                "Fix or shorten them, or give a longer context."
            )


@dataclass(frozen=True)
class Answers:
    """An output file that this run holds.

    Attributes:
        done: the records that it held, by the index of their prompt.
        skipped: what was refused, in earlier runs of the same settings and in this one.
    """

    path: Path
    writer: ResumableWriter
    done: dict[int, dict[str, Any]]
    skipped: Skipped

    def waiting(
        self, asked: Collection[Conversation], noun: str, *, retry: bool
    ) -> list[Conversation]:
        """The prompts neither answered nor refused yet; prints how many are done.

        Args:
            noun: ``prompts``. retry: ask again what was refused.
        """
        if retry:
            self.skipped.forget()
        known = {*self.done, *self.skipped.unanswered}
        before = f"{len(self.done)} already answered in {self.path}"
        if self.skipped.found:
            before += f", {len(self.skipped.found)} skipped before"
        print(f"{len(asked)} {noun}, {before}")
        return [one for one in asked if one.index not in known]

    async def add_all(
        self,
        waiting: Sequence[Conversation],
        ask: Callable[[Conversation], Awaitable[tuple[dict[str, Any], int, str | None]]],
        concurrency: int,
        unit: str,
    ) -> int:
        """Keep ``concurrency`` conversations in flight; write each record as it comes.

        Args:
            ask: returns the record, how many answers it holds, and why it ends early, or None.
            unit: of the progress bar.

        Returns:
            The number of records written.
        """
        from tqdm import tqdm

        queue, written = iter(waiting), 0
        done = len(self.done)
        bar = tqdm(total=len(waiting) + done, initial=done, unit=unit, dynamic_ncols=True)

        async def worker() -> None:
            nonlocal written
            for conversation in queue:
                record, answers, reason = await ask(conversation)
                if reason is not None:  # first, so that a kill in between asks it again
                    self.skipped.add(conversation, reason, answers)
                if answers:
                    self.writer.append(record)
                    written += 1
                bar.update(1)

        with bar:
            await asyncio.gather(*(worker() for _ in range(min(concurrency, len(waiting)))))
        return written


async def converse(
    conversation: Conversation, generate: Callable[[Messages], Awaitable[tuple[str, Any]]]
) -> tuple[Messages, list[Any], str | None]:
    """Ask the steps of a conversation in order, each after the answers before it.

    Args:
        generate: from the messages so far to the answer's text and anything else; may raise
            :class:`Refused`.

    Returns:
        The messages with their answers, what ``generate`` returned besides texts, and why the
        conversation ends early, or None.
    """
    messages: Messages = []
    found: list[Any] = []
    for number, step in enumerate(conversation.steps, 1):
        try:
            text, more = await generate([*messages, *step])
        except (Refused, TemplateRefused) as error:
            turn = f"turn {number}: " if conversation.text is None else ""
            return messages, found, f"{turn}{getattr(error, 'reason', error)}"
        messages += [*step, {"role": "assistant", "content": text}]
        found.append(more)
    return messages, found, None


def _is_list(path: Path) -> bool:
    """Whether every line is an entry of :class:`Skipped`."""
    try:
        return all(e.keys() == ENTRY for _, e in read_lines(path))
    except JsonlError:
        return False


@contextmanager
def hold_answers(
    output: Path, kind: str, settings: Mapping[str, Any], digests: Mapping[int, str]
) -> Iterator[Answers]:
    """Hold an output file whose records have ``index`` and ``digest``.

    The prompt of a last line that a kill cut is asked again.

    Args:
        settings: everything that affects an answer. digests: of the prompts, by index.

    Raises:
        NotOurs: the file is something else, or answers with other settings. InUse: another run
            writes it. HyperDFlashConfigError: it answers another input, or is damaged.
        JsonlError: a line inside it is damaged.
    """
    # Before the claim: its marker would make another list look like an earlier run's.
    listed = skipped_path(output)
    left_over = check(output, kind, settings, is_file=True) is None and listed.exists()
    if left_over and not _is_list(listed):
        raise NotOurs(
            f"{listed} is there, but no run of these settings in {output}: it is not this run's "
            "list. Nothing was written. Choose another --output, or remove it."
        )
    with claim(output, kind, settings, is_file=True), ResumableWriter(output) as writer:
        if left_over:
            print(f"{listed}: removed, the list of a run with other settings that has no answers")
            listed.unlink()
        if writer.torn:
            print(f"{output}: dropped line {writer.torn}, cut by a kill; its prompt is asked again")
        done = {record.get("index"): record for record in writer.records}
        for index, record in done.items():
            digest = record.get("digest")
            if index is None or digest != digests.get(index, digest):
                raise HyperDFlashConfigError(
                    f"--output {output} holds answers to another input, or is damaged (index "
                    f"{index}). Choose another --output, or remove {output} and run again."
                )
        done = {index: done[index] for index in done if index in digests}
        yield Answers(output, writer, done, Skipped(output, digests))

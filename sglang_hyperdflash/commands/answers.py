"""Commands that answer prompts: how a server is asked, and an output that is its own resume state.

Refused prompts are listed in ``OUTPUT.skipped.jsonl``; the next run asks them again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import requests

from sglang_hyperdflash.tools.atomic import write_text
from sglang_hyperdflash.tools.chat_template import TemplateRefused, render
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, ServerFailed
from sglang_hyperdflash.tools.jsonl import ResumableWriter
from sglang_hyperdflash.tools.ownership import NotOurs, check, claim
from sglang_hyperdflash.tools.server_process import reason_of
from sglang_hyperdflash.training.conversations import Messages

SHOWN = 5  # printed lines of a list; the rest is in its file
ATTEMPTS, PAUSE = 3, 2.0  # seconds before the second attempt, doubled for each further one


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
    """The server refuses a prompt; the text gives the reason."""


def server_info(url: str) -> dict[str, Any]:
    """A running server's ``/server_info``; raises ``ServerFailed`` where nothing answers."""
    try:
        answer = requests.get(f"{url}/server_info", timeout=60)
        answer.raise_for_status()
        return answer.json()
    except (requests.RequestException, ValueError) as error:
        raise ServerFailed(
            f"no SGLang server answers at {url}: {error!r}. Start one with "
            "`python -m sglang.launch_server --model-path TARGET`."
        ) from error


async def ask(url: str, **payload: Any) -> dict[str, Any]:
    """The answer to one ``/generate`` request; a busy server is asked again.

    Raises:
        Refused: the server does not take it. ServerFailed: no answer after ``ATTEMPTS``.
    """
    for attempt in range(ATTEMPTS):
        if attempt:
            await asyncio.sleep(PAUSE * 2 ** (attempt - 1))
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session,
                session.post(f"{url}/generate", json=payload) as reply,
            ):
                if reply.status == 400:
                    raise Refused(reason_of(await reply.text()))
                reply.raise_for_status()
                return await reply.json(content_type=None)
        except (aiohttp.ClientError, TimeoutError, ValueError) as error:
            failure = error
    raise ServerFailed(
        f"{url} failed {ATTEMPTS} times: {failure!r}. What is finished is kept; run the same "
        "command again to resume."
    ) from failure


@dataclass(frozen=True)
class Asker:
    """Asks a server whole conversations.

    Attributes:
        limit: the server's ``max_req_input_len``: the most tokens of a prompt, plus one; it leaves
            out what SGLang reserves of the context and of the K/V pool.
        sampling: SGLang's parameters; ``max_new_tokens`` is cut to what ``limit`` leaves.
        template: arguments of the chat template.
    """

    url: str
    limit: int
    tokenizer: Any
    sampling: Mapping[str, Any]
    template: Mapping[str, Any] = field(default_factory=dict)

    async def converse(
        self, asked: Conversation
    ) -> tuple[Messages, list[dict[str, Any]], str | None]:
        """Ask the steps in order, each after the answers before it.

        Returns:
            The messages with their answers, the server's replies, each with its ``input_ids``, and
            why the conversation ends early, or None.
        """
        messages: Messages = []
        replies: list[dict[str, Any]] = []
        for number, step in enumerate(asked.steps, 1):
            try:
                tokens = self._tokens(asked, [*messages, *step])
                reply = await self._generate(tokens)
            except (Refused, TemplateRefused) as error:
                turn = f"turn {number}: " if asked.text is None else ""
                return messages, replies, f"{turn}{getattr(error, 'reason', error)}"
            messages += [*step, {"role": "assistant", "content": reply["text"]}]
            replies.append(reply | {"input_ids": tokens})
        return messages, replies, None

    def _tokens(self, asked: Conversation, messages: Messages) -> list[int]:
        """The prompt of the next answer."""
        if asked.text is not None:
            return self.tokenizer.encode(asked.text, add_special_tokens=True)
        text = render(self.tokenizer, messages, prompt=True, where=asked.where, **self.template)
        return self.tokenizer.encode(text, add_special_tokens=False)

    async def _generate(self, tokens: list[int]) -> dict[str, Any]:
        room = self.limit - len(tokens)
        if room <= 0:
            raise Refused(
                f"the prompt has {len(tokens)} tokens, the server accepts {self.limit - 1}"
            )
        new = min(self.sampling["max_new_tokens"], room)
        sampling = {**self.sampling, "max_new_tokens": new}
        return await ask(self.url, input_ids=tokens, sampling_params=sampling)


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
        done: the records that it held, by the index of their prompt.
        noun: what the prompts are called, ``prompts``.
    """

    path: Path
    writer: ResumableWriter
    done: dict[int, dict[str, Any]]
    noun: str

    def waiting(self, asked: Collection[Conversation]) -> list[Conversation]:
        """The prompts without an answer; prints how many are done."""
        print(f"{len(asked)} {self.noun}, {len(self.done)} already answered in {self.path}")
        return [one for one in asked if one.index not in self.done]

    async def add_all(
        self,
        waiting: Sequence[Conversation],
        asker: Asker,
        fields: Callable[[Messages, list[dict[str, Any]]], dict[str, Any]],
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
        from tqdm import tqdm

        queue, written, refused = iter(waiting), 0, []
        done = len(self.done)
        bar = tqdm(total=len(waiting) + done, initial=done, unit="prompt", dynamic_ncols=True)

        async def worker() -> None:
            nonlocal written
            for one in queue:
                messages, replies, reason = await asker.converse(one)
                record = {"index": one.index, "digest": one.digest}
                if reason is not None:
                    refused.append(record | {"where": one.where, "reason": reason})
                    record["refused"] = reason
                if replies:
                    self.writer.append(record | fields(messages, replies))
                    written += 1
                bar.update(1)

        with bar:
            await asyncio.gather(*(worker() for _ in range(min(concurrency, len(waiting)))))
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
    output: Path, kind: str, settings: Mapping[str, Any], asked: Sequence[Conversation], noun: str
) -> Iterator[Answers]:
    """Hold an output file whose records have ``index`` and ``digest``.

    The prompt of a last line that a kill cut is asked again.

    Args:
        settings: everything that affects an answer.

    Raises:
        NotOurs: the file is something else, or answers with other settings. InUse: another run
            writes it. HyperDFlashConfigError: it answers another input, or is damaged.
        JsonlError: a line inside it is damaged.
    """
    listed = skipped_path(output)
    if check(output, kind, settings, is_file=True) is None and listed.exists():
        raise NotOurs(
            f"{listed} is there, but no run of these settings in {output}: it is not this run's "
            "list. Nothing was written. Choose another --output, or remove it."
        )
    digests = {one.index: one.digest for one in asked}
    with claim(output, kind, settings, is_file=True), ResumableWriter(output) as writer:
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
        yield Answers(output, writer, done, noun)

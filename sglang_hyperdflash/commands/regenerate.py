"""``hyperdflash regenerate``: the target's own answers to a data set's prompts, as training data.

A drafter learns its target's answers, so a data set's own are dropped and every user turn is asked
again, after the target's answers to earlier turns. The exact tokens are kept: tokenising the text
again may give others. One output line a conversation,
``{"index", "digest", "messages", "samples": [{"tokens", "spans"}]}`` with one sample an answer;
the file is its own resume state. Refused prompts are listed, with file and line, in
``OUTPUT.skipped.jsonl``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import requests

from sglang_hyperdflash.commands.answers import (
    Answers,
    Conversation,
    Refused,
    converse,
    hold_answers,
    room_for,
    sampling_of,
)
from sglang_hyperdflash.commands.generate import json_option
from sglang_hyperdflash.draft.hc_head import tensors_fingerprint
from sglang_hyperdflash.targets.files import TargetFiles, load_tokenizer
from sglang_hyperdflash.tools.chat_template import check_template, render
from sglang_hyperdflash.tools.checksum import short_hash
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, ServerFailed
from sglang_hyperdflash.tools.ownership import keep_apart, location
from sglang_hyperdflash.tools.server_process import reason_of
from sglang_hyperdflash.training.conversations import HUB, Messages, read_conversations

KIND = "hyperdflash regenerate"
ATTEMPTS, PAUSE = 3, 2.0  # seconds before the second attempt, doubled for each further one


def read_tasks(paths: list[str], limit: int | None) -> list[Conversation]:
    """The user and system turns of every conversation, in order; each user turn is answered."""
    tasks: list[Conversation] = []
    for path in paths:
        for messages, where in read_conversations(path):
            if limit is not None and len(tasks) == limit:
                return tasks
            steps: list[Messages] = [[]]
            prompts = [m for m in messages if m["role"] != "assistant"]
            for message in prompts:
                steps[-1].append(message)
                if message["role"] == "user":
                    steps.append([])
            tasks.append(Conversation(len(tasks), short_hash(prompts), where, steps[:-1]))
    return tasks


@dataclass(frozen=True)
class Served:
    """A running SGLang server's ``/server_info``.

    Attributes:
        model: its ``--model-path``, as it was given. context: the most tokens of
            an input, plus one; SGLang reserves a few of its context and of its K/V pool.
        name: the last part of ``model``: the same for different spellings of a path.
    """

    url: str
    model: str
    context: int

    @property
    def name(self) -> str:
        return self.model.rstrip("/").rpartition("/")[-1]

    @classmethod
    def at(cls, url: str) -> Served:
        """Ask a server; raises ``ServerFailed`` where nothing answers."""
        url = url.rstrip("/")
        try:
            answer = requests.get(f"{url}/server_info", timeout=30)
            answer.raise_for_status()
            info = answer.json()
            return cls(url, str(info["model_path"]), int(info["max_req_input_len"]))
        except (requests.RequestException, KeyError, TypeError, ValueError) as error:
            raise ServerFailed(
                f"no SGLang server answers at {url}: {error!r}. Start one with "
                "`python -m sglang.launch_server --model-path TARGET`."
            ) from error

    def check(self, target: str, answers: Answers) -> None:
        """Refuse a model that is certainly not ``target``, or not that of earlier answers.

        That is a local folder with another final norm. A relative path, a path of another
        machine, a hub id and a copy of the target, quantised or not, may be the target.

        Raises:
            HyperDFlashConfigError: the server serves another model.
        """
        for record in answers.done.values():
            if record.get("served", self.name) != self.name:
                raise HyperDFlashConfigError(
                    f"{answers.path} holds answers of {record['served']}, and the server at "
                    f"{self.url} serves {self.model}. Start the server of those answers, or choose "
                    "another --output."
                )
        here = urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1")
        if not here or not Path(self.model).is_absolute():
            return
        norms = _norm(self.model), _norm(target)
        if None not in norms and norms[0] != norms[1]:
            raise HyperDFlashConfigError(
                f"the server at {self.url} serves {self.model}, expected --target {target}: their "
                "final norms differ. Give the --target that it serves, or a server of this one."
            )


def _norm(name: str) -> str | None:
    """A hash of a local target's final norm; None where it cannot be read."""
    try:
        if not Path(name).is_dir():
            return None
        return tensors_fingerprint(TargetFiles(name).tensor("norm"))
    except (
        OSError,
        HyperDFlashConfigError,
    ):  # another user's server may read files that we may not
        return None


class Client:
    """A running SGLang server, asked with token ids.

    Args:
        sampling: SGLang sampling parameters; ``max_new_tokens`` is cut to what the server's context
            leaves after a prompt.

    Attributes:
        tokens: generated so far.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        served: Served,
        tokenizer,
        sampling: dict[str, Any],
        template: dict,
    ) -> None:
        self.session, self.served, self.tokenizer = session, served, tokenizer
        self.sampling, self.template = sampling, template
        self.tokens = 0

    async def answer(self, task: Conversation) -> tuple[dict[str, Any], int, str | None]:
        """Ask every user turn: the record, how many answers it holds, why it ends early."""

        async def generate(messages: Messages) -> tuple[str, dict[str, Any]]:
            text = render(self.tokenizer, messages, prompt=True, where=task.where, **self.template)
            prompt = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            output, text = await self._generate(prompt)
            self.tokens += len(output)
            end = len(prompt) + len(output)
            return text, {"tokens": prompt + output, "spans": [[len(prompt), end]]}

        messages, samples, reason = await converse(task, generate)
        record = {"index": task.index, "digest": task.digest, "served": self.served.name}
        return record | {"messages": messages, "samples": samples}, len(samples), reason

    async def _generate(self, tokens: list[int]) -> tuple[list[int], str]:
        """The target's answer: its tokens and text. Retries while the server is busy.

        Raises:
            Refused: the prompt is too long, or wrong for the server. ServerFailed: no answer.
        """
        new = min(self.sampling["max_new_tokens"], room_for(len(tokens), self.served.context))
        payload = {"input_ids": tokens, "sampling_params": self.sampling | {"max_new_tokens": new}}
        url = self.served.url
        for attempt in range(1, ATTEMPTS + 1):
            try:
                async with self.session.post(f"{url}/generate", json=payload) as answer:
                    if answer.status == 400:
                        raise Refused(reason_of(await answer.text()))
                    answer.raise_for_status()
                    body = await answer.json(content_type=None)
                    return body["output_ids"], body["text"]
            except (aiohttp.ClientError, TimeoutError, json.JSONDecodeError) as error:
                if attempt == ATTEMPTS:
                    raise ServerFailed(
                        f"{url} failed {ATTEMPTS} times: {error}. Answers so far are kept; "
                        "run the same command again to resume."
                    ) from error
                await asyncio.sleep(PAUSE * 2 ** (attempt - 1))
        raise AssertionError("unreachable")


def add_parser(commands) -> None:
    """Register ``regenerate`` and its arguments."""
    parser = commands.add_parser(
        "regenerate",
        help="answer a data set's prompts with the target, for training",
        description="Answer every user turn of chat JSONL with a running SGLang server and keep "
        "the exact tokens: training data for `hyperdflash train`. Run again to resume.",
    )
    add = parser.add_argument
    add("--server", required=True, help="address of a running SGLang server, http://HOST:PORT")
    add("--target", required=True, help="folder or hub id of the target's tokenizer")
    add("--input", nargs="+", required=True, help="chat JSONL files, or hub:OWNER/NAME")
    add("--output", type=Path, required=True, help="JSONL of the answers; run again to resume")
    add("--temperature", type=float, default=0.7, help="0 is greedy")
    add("--top-p", type=float, default=0.8, help="nucleus sampling; 1 is off")
    add("--top-k", type=int, default=20, help="tokens to sample from; -1 is all")
    add(
        "--max-new-tokens",
        type=int,
        default=2048,
        help="most tokens of an answer; less if the server's context leaves less",
    )
    add("--concurrency", type=int, default=32, help="conversations in flight")
    add("--limit", type=int, help="most conversations to answer (default: all)")
    add(
        "--retry-skipped",
        action="store_true",
        help="ask again what the server refused in an earlier run",
    )
    add(
        "--template-args",
        default="{}",
        help="arguments of the chat template as JSON, for example '{\"thinking\": true}'",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer what is not answered yet."""
    sampling = sampling_of(args)
    if args.limit is not None and args.limit < 1:
        raise HyperDFlashConfigError(
            f"--limit must be at least 1, found {args.limit}. Leave it out to answer all."
        )
    template = json_option("--template-args", args.template_args)
    for name in (name for name in args.input if not name.startswith(HUB)):
        keep_apart("--output", args.output, {"the target": args.target, "the input": name})
    tokenizer = load_tokenizer(args.target)
    check_template(tokenizer)
    settings = sampling | {"target": location(args.target), "template": template}
    tasks = read_tasks(args.input, args.limit)
    digests = {task.index: task.digest for task in tasks}
    with hold_answers(args.output, KIND, settings, digests) as answers:
        waiting = answers.waiting(tasks, "conversations", retry=args.retry_skipped)
        if waiting:
            served = Served.at(args.server)
            served.check(args.target, answers)
            print(f"{served.url} serves {served.model}")
            work = _answer(args, served, tokenizer, sampling, template, waiting, answers)
            answered, tokens = asyncio.run(work)
            print(f"{answered} conversations answered with {tokens} tokens")
            answers.skipped.say("conversations", len(answers.done) + answered)
    return 0


async def _answer(
    args: argparse.Namespace,
    served: Served,
    tokenizer,
    sampling: dict[str, Any],
    template: dict,
    waiting: list[Conversation],
    answers: Answers,
) -> tuple[int, int]:
    """Ask, and write each answer as it comes: how many conversations, how many tokens."""
    limits = {"timeout": aiohttp.ClientTimeout(3600), "connector": aiohttp.TCPConnector(limit=0)}
    async with aiohttp.ClientSession(**limits) as session:
        client = Client(session, served, tokenizer, sampling, template)
        written = await answers.add_all(waiting, client.answer, args.concurrency, "conversation")
        return written, client.tokens

"""``hyperdflash regenerate``: the target's own answers to a data set's prompts, as training data.

A drafter learns what its target says, so the answers of a data set are thrown away and every user
turn is asked again, each seeing the target's answers before it. The exact tokens are kept: text
would be tokenised again, and not always to the same tokens. One output line a conversation,
``{"index", "digest", "messages", "samples": [{"tokens", "spans"}]}`` with one sample an answer;
the file is its own resume state.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from sglang_hyperdflash.commands.generate import json_option, resume
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, ServerFailed
from sglang_hyperdflash.training.conversations import Messages, read_conversations

ATTEMPTS = 3


@dataclass(frozen=True)
class Task:
    """One conversation to answer: its messages without any assistant's."""

    index: int
    digest: str
    prompts: Messages


def read_tasks(paths: list[str], limit: int | None) -> list[Task]:
    """The user and system turns of every conversation, in order."""
    tasks: list[Task] = []
    for path in paths:
        for messages in read_conversations(path):
            if limit is not None and len(tasks) == limit:
                return tasks
            prompts = [m for m in messages if m["role"] != "assistant"]
            digest = hashlib.sha256(json.dumps(prompts).encode()).hexdigest()[:16]
            tasks.append(Task(len(tasks), digest, prompts))
    return tasks


class Client:
    """A running SGLang server, asked with token ids.

    Args:
        url: its address. sampling: SGLang sampling parameters.

    Raises:
        ServerFailed: nothing answers there.
    """

    def __init__(self, url: str, tokenizer, sampling: dict[str, Any], template: dict) -> None:
        self.url, self.tokenizer = url.rstrip("/"), tokenizer
        self.sampling, self.template = sampling, template
        try:
            requests.get(f"{self.url}/health", timeout=30).raise_for_status()
        except requests.RequestException as error:
            raise ServerFailed(
                f"no SGLang server answers at {url}: {error}. Start one with "
                "`python -m sglang.launch_server --model-path TARGET`."
            ) from error

    def prompt_tokens(self, messages: Messages) -> list[int]:
        """The conversation so far, ready for the next answer."""
        text = self.tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **self.template
        )
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def generate(self, tokens: list[int]) -> tuple[list[int], str]:
        """The target's answer: its tokens and text. Retries what a busy server refuses."""
        payload = {"input_ids": tokens, "sampling_params": self.sampling}
        for attempt in range(1, ATTEMPTS + 1):
            try:
                answer = requests.post(f"{self.url}/generate", json=payload, timeout=3600)
                if answer.status_code == 400:
                    raise HyperDFlashConfigError(f"the server refused a prompt: {answer.text}")
                answer.raise_for_status()
                body = answer.json()
                return body["output_ids"], body["text"]
            except requests.RequestException as error:
                if attempt == ATTEMPTS:
                    raise ServerFailed(
                        f"{self.url} failed {ATTEMPTS} times: {error}. Answers so far are kept; "
                        "run the same command again to go on."
                    ) from error
                time.sleep(2.0**attempt)
        raise AssertionError("unreachable")

    def answer(self, task: Task) -> dict[str, Any]:
        """Ask every user turn in order."""
        messages: Messages = []
        samples = []
        for message in task.prompts:
            messages.append(message)
            if message["role"] != "user":
                continue
            prompt = self.prompt_tokens(messages)
            output, text = self.generate(prompt)
            samples.append(
                {"tokens": prompt + output, "spans": [[len(prompt), len(prompt) + len(output)]]}
            )
            messages.append({"role": "assistant", "content": text})
        return {
            "index": task.index,
            "digest": task.digest,
            "messages": messages,
            "samples": samples,
        }


def answer_all(client: Client, tasks: list[Task], out: Path, concurrency: int, done: int) -> int:
    """Answer tasks ``concurrency`` at a time, appending each as it finishes; returns tokens."""
    from tqdm import tqdm

    queue: Iterator[Task] = iter(tasks)
    lock, failed = threading.Lock(), threading.Event()
    total = 0
    bar = tqdm(total=len(tasks) + done, initial=done, unit="conversation", dynamic_ncols=True)

    def worker() -> None:
        nonlocal total
        while not failed.is_set():
            with lock:
                task = next(queue, None)
            if task is None:
                return
            try:
                record = client.answer(task)
            except BaseException:
                failed.set()
                raise
            line = json.dumps(record, ensure_ascii=False) + "\n"
            with lock:
                file.write(line.encode())
                file.flush()
                total += sum(s["spans"][0][1] - s["spans"][0][0] for s in record["samples"])
                bar.update(1)

    with out.open("ab") as file, ThreadPoolExecutor(concurrency) as pool:
        for future in [pool.submit(worker) for _ in range(concurrency)]:
            future.result()
    bar.close()
    return total


def add_parser(commands) -> None:
    """Register ``regenerate`` and its arguments."""
    parser = commands.add_parser(
        "regenerate",
        help="answer a data set's prompts with the target, for training",
        description="Ask a running SGLang server every user turn of chat JSONL again and keep the "
        "exact tokens. The output is training data for `hyperdflash train`; run again to resume.",
    )
    add = parser.add_argument
    add("--server", required=True, help="address of a running SGLang server, http://HOST:PORT")
    add("--target", required=True, help="folder or hub id of the target's tokenizer")
    add("--input", nargs="+", required=True, help="chat JSONL files, or hub:OWNER/NAME")
    add("--output", type=Path, required=True)
    add("--temperature", type=float, default=0.7)
    add("--top-p", type=float, default=0.8)
    add("--top-k", type=int, default=20)
    add("--max-new-tokens", type=int, default=2048)
    add("--concurrency", type=int, default=32)
    add("--limit", type=int, help="conversations to answer at most")
    add(
        "--template-args",
        default="{}",
        help="arguments of the chat template as JSON, for example '{\"thinking\": true}'",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer what is not answered yet."""
    from transformers import AutoTokenizer

    if args.concurrency < 1 or args.max_new_tokens < 1:
        raise HyperDFlashConfigError("--concurrency and --max-new-tokens must be at least 1.")
    template = json_option("--template-args", args.template_args)
    tasks = read_tasks(args.input, args.limit)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    done = resume(args.output, tasks)
    waiting = [task for task in tasks if task.index not in done]
    print(f"{len(tasks)} conversations, {len(done)} already answered in {args.output}")
    if not waiting:
        return 0
    names = ("temperature", "top_p", "top_k", "max_new_tokens")
    sampling = {name: getattr(args, name) for name in names}
    client = Client(args.server, AutoTokenizer.from_pretrained(args.target), sampling, template)
    tokens = answer_all(client, waiting, args.output, args.concurrency, len(done))
    print(f"{len(waiting)} conversations answered with {tokens} tokens")
    return 0

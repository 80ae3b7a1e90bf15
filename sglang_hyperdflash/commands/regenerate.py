"""``hyperdflash regenerate``: the target's own answers to a data set's prompts, as training data.

A drafter learns its target's answers, so a data set's own are dropped and every user turn is asked
again, after the target's answers to earlier turns. The exact tokens are kept: tokenising the text
again may give others. One output line a conversation,
``{"index", "digest", "messages", "samples": [{"tokens", "spans"}]}`` with one sample an answer;
the file is its own resume state.
"""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sglang_hyperdflash.commands.answers import (
    Answers,
    Asker,
    Conversation,
    hold_answers,
    server_info,
)
from sglang_hyperdflash.commands.generate import SAMPLING, add_sampling, json_option
from sglang_hyperdflash.draft.hc_head import tensors_fingerprint
from sglang_hyperdflash.targets.files import TargetFiles, load_tokenizer
from sglang_hyperdflash.tools.chat_template import check_template
from sglang_hyperdflash.tools.checksum import short_hash
from sglang_hyperdflash.tools.command_line import COUNT
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.ownership import keep_apart, location
from sglang_hyperdflash.training.conversations import Messages, read_conversations

KIND = "hyperdflash regenerate"


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
    """A running server at ``url``; ``model`` is its ``--model-path``, as it was given."""

    url: str
    model: str

    @property
    def name(self) -> str:
        """The last part of ``model``: the same for different spellings of a path."""
        return self.model.rstrip("/").rpartition("/")[-1]

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
    except (OSError, HyperDFlashConfigError):  # a server of another user may read more than we
        return None


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
    add_sampling(parser, max_new_tokens=2048, temperature=0.7, top_p=0.8, top_k=20)
    add("--concurrency", type=COUNT, default=32, help="conversations in flight")
    add("--limit", type=COUNT, help="most conversations to answer (default: all)")
    text = "arguments of the chat template as JSON, for example '{\"thinking\": true}'"
    add("--template-args", default="{}", help=text)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Answer what is not answered yet."""
    sampling = {name: getattr(args, name) for name in SAMPLING if name != "min_p"}
    template = json_option("--template-args", args.template_args)
    for name in args.input:
        keep_apart("--output", args.output, {"the target": args.target, "the input": name})
    tokenizer = load_tokenizer(args.target)
    check_template(tokenizer)
    settings = sampling | {"target": location(args.target), "template": template}
    tasks = read_tasks(args.input, args.limit)
    with hold_answers(args.output, KIND, settings, tasks, "conversations") as answers:
        waiting = answers.waiting(tasks)
        if waiting:
            url = args.server.rstrip("/")
            info = server_info(url)
            served = Served(url, str(info["model_path"]))
            served.check(args.target, answers)
            print(f"{url} serves {served.model}")
            asker = Asker(url, int(info["max_req_input_len"]), tokenizer, sampling, template)
            fields = partial(record_fields, served.name)
            answered = asyncio.run(answers.add_all(waiting, asker, fields, args.concurrency))
            print(f"{answered} conversations answered")
    return 0


def record_fields(served: str, messages: Messages, replies: list[dict[str, Any]]) -> dict[str, Any]:
    """A conversation's record, with one training sample an answer."""
    samples = []
    for reply in replies:
        prompt, output = reply["input_ids"], reply["output_ids"]
        tokens = prompt + output
        samples.append({"tokens": tokens, "spans": [[len(prompt), len(tokens)]]})
    return {"served": served, "messages": messages, "samples": samples}

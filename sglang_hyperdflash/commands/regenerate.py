"""``hyperdflash regenerate``: the target's own answers to a data set's prompts, as training data.

A drafter learns its target's answers, so the data set's answers are dropped and every user turn is
asked again, after the target's answers to earlier turns. The exact tokens are kept, because
tokenising the text again may give others. Each conversation is one output line,
``{"index", "digest", "messages", "samples": [{"tokens", "spans"}]}``; as long as a conversation
only grows, it is one sample with a span for each answer. The file holds the state of the run.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from sglang_hyperdflash.commands.answers import Asker, Conversation, Prompts, hold_answers
from sglang_hyperdflash.commands.generate import QUOTED, SAMPLING
from sglang_hyperdflash.commands.pool import Pool, server_info
from sglang_hyperdflash.draft.hc_head import tensors_fingerprint
from sglang_hyperdflash.targets.chats import Message, load_chats
from sglang_hyperdflash.targets.files import TargetFiles
from sglang_hyperdflash.tools.checksum import short_hash
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.fields import json_object
from sglang_hyperdflash.tools.ownership import keep_apart, location
from sglang_hyperdflash.training.conversations import joined, parse_conversation

KIND = "hyperdflash regenerate"


def read_task(index: int, record: Mapping[str, Any], where: str) -> Conversation:
    """Parse a row's conversation, whose user turns are all answered; raise ``BadRow``."""
    chat = parse_conversation(record, where)
    steps = steps_of(chat.messages)
    digest = short_hash([steps, chat.tools, dict(chat.options)])
    return Conversation(index, digest, where, steps, chat=chat.with_messages([]))


def steps_of(messages: Sequence[Message]) -> list[list[Message]]:
    """Return the messages without answers, split after each user message and last tool result.

    An answer that calls tools stays, before the tools' results.
    """
    steps: list[list[Message]] = [[]]
    for message, following in zip_longest(messages, messages[1:], fillvalue={}):
        role, before_results = message["role"], following.get("role") == "tool"
        if role != "assistant" or before_results:
            steps[-1].append(message)
        if role == "user" or (role == "tool" and not before_results):
            steps.append([])
    return steps[:-1]


@dataclass(frozen=True)
class TargetServer:
    """A running server.

    Attributes:
        model: its ``--model-path``, as it was given.
        max_req_input_len: the most tokens of a prompt, plus one.
    """

    url: str
    model: str
    max_req_input_len: int

    @classmethod
    def at(cls, url: str) -> TargetServer:
        """Return the server at an address; raise ``ServerFailed`` if nothing answers."""
        info = server_info(url)
        return cls(url, str(info["model_path"]), int(info["max_req_input_len"]))

    @property
    def name(self) -> str:
        """The last part of ``model``: the same for different spellings of a path."""
        return self.model.rstrip("/").rpartition("/")[-1]

    def check(self, target: str, holders: Mapping[str, str]) -> None:
        """Raise ``HyperDFlashConfigError`` for a model that is not ``target``, or not a holder's.

        Only a local folder with another final norm is certainly not the target. A relative path,
        a path of another machine, a hub id, and a copy of the target, quantised or not, may be.

        Args:
            holders: names of models, and where each is from.
        """
        for name, holder in holders.items():
            if name != self.name:
                raise HyperDFlashConfigError(
                    f"{holder} {name}, and the server at {self.url} serves {self.model}. Start "
                    "servers of one model, or choose another --output."
                )
        is_local = urlsplit(self.url).hostname in ("localhost", "127.0.0.1", "::1")
        if not is_local or not Path(self.model).is_absolute():
            return
        norms = _norm(self.model), _norm(target)
        if None not in norms and norms[0] != norms[1]:
            raise HyperDFlashConfigError(
                f"the server at {self.url} serves {self.model}, expected --target {target}: their "
                "final norms differ. Give the --target that it serves, or a server of this one."
            )


def _norm(name: str) -> str | None:
    """Return a hash of a local target's final norm, or None if it cannot be read."""
    with suppress(OSError, HyperDFlashConfigError):  # the server's user may read more than we may
        if Path(name).is_dir():
            return tensors_fingerprint(TargetFiles(name).tensor("norm"))
    return None


def run(args: argparse.Namespace) -> int:
    """Answer the conversations without an answer."""
    sampling = {name: getattr(args, name) for name in SAMPLING if name != "min_p"}
    options = json_object(args.template_args, "--template-args", QUOTED)
    for name in args.input:
        keep_apart("--output", args.output, {"the target": args.target, "the input": name})
    chats = load_chats(args.target)
    chats.check(options)
    settings = sampling | {
        "finished_only": args.finished_only,
        "target": location(args.target),
        "template": options,
    }
    prompts = Prompts("conversations", args.input, read_task, args.limit, args.strict)
    with hold_answers(args.output, KIND, settings, prompts) as answers:
        if answers.left:
            servers = check_servers(args, answers.served)
            limit = min(server.max_req_input_len for server in servers)
            pool = Pool({server.url: server.model for server in servers})
            asker = Asker(pool, limit, chats, sampling, options, args.finished_only)
            fields = partial(record_fields, servers[0].name)
            written = asyncio.run(answers.add_all(asker, fields, args.concurrency))
            print(f"{written} conversations answered")
    return 0


def check_servers(args: argparse.Namespace, served: Iterable[str]) -> list[TargetServer]:
    """Return the servers; raise as :meth:`TargetServer.at` and :meth:`TargetServer.check` do.

    Args:
        served: the names of the models that have answered so far.
    """
    servers = [TargetServer.at(url) for url in dict.fromkeys(u.rstrip("/") for u in args.server)]
    holders = {name: f"{args.output} holds answers of" for name in served}
    for server in servers:
        server.check(args.target, holders)
        holders.setdefault(server.name, f"the server at {server.url} serves")
        print(f"{server.url} serves {server.model}")
    return servers


def record_fields(
    served: str, messages: list[Message], replies: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return the fields of a conversation's record, with its training samples."""
    samples = joined((r["input_ids"], r["output_ids"]) for r in replies if r["output_ids"])
    entries = [{"tokens": s.tokens, "spans": list(map(list, s.spans))} for s in samples]
    return {"served": served, "messages": messages, "samples": entries}

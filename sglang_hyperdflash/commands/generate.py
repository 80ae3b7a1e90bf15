"""``hyperdflash generate``: answer a JSONL file offline through an SGLang server of its own.

Every input line gives one output line ``{"index", "outputs", ...}`` in order of completion. The
output file is append-only and holds the state of the run: a line that a kill cut is dropped, and
finished indices are skipped, so nothing is lost or doubled.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from collections import Counter
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.commands.answers import Asker, Conversation, Prompts, hold_answers
from sglang_hyperdflash.commands.command_server import start_server
from sglang_hyperdflash.commands.pool import Pool, server_info
from sglang_hyperdflash.draft.config import load_config
from sglang_hyperdflash.targets.chats import Message, load_chats
from sglang_hyperdflash.targets.files import is_hub_id
from sglang_hyperdflash.tools.acceptance import accept_length, counters
from sglang_hyperdflash.tools.checksum import short_hash
from sglang_hyperdflash.tools.errors import BadRow, HyperDFlashConfigError
from sglang_hyperdflash.tools.fields import json_object, shown
from sglang_hyperdflash.tools.ownership import keep_apart, location
from sglang_hyperdflash.training.conversations import check_answer, parse_conversation

KIND = "hyperdflash generate"
# Server arguments that --engine-args may not set, and what to do instead.
RESERVED_ARGUMENTS = {
    "model_path": "Use --model.",
    "tokenizer_path": "Leave it out: the tokenizer is the target's own.",
    "dtype": "Use --dtype.",
    "tp_size": "Use --tp.",
    "log_level": "Use --verbose.",
    "api_key": "Leave it out: the server answers this command alone.",
    "speculative_algorithm": "Use --draft.",
    "speculative_draft_model_path": "Use --draft.",
}
QUOTED = "Put it in quotes."  # the advice for an option that holds JSON
SAMPLING = ("temperature", "top_p", "top_k", "max_new_tokens", "min_p")
# Server arguments that change its memory, not its answers.
MEMORY_ONLY = frozenset(
    (
        *("base_gpu_id", "chunked_prefill_size", "cpu_offload_gb", "max_prefill_tokens"),
        *("max_running_requests", "max_total_tokens", "mem_fraction_static", "nccl_port", "port"),
    )
)


def parse_prompt(index: int, record: Mapping[str, Any], where: str) -> Conversation:
    """Parse a row's prompt, one of ``prompt``, ``messages`` and ``turns``; raise ``BadRow``."""
    kinds = [kind for kind in ("prompt", "messages", "turns") if record.get(kind) is not None]
    digest = short_hash(record)
    if len(kinds) != 1:
        names = " and ".join(kinds) or f"only {', '.join(record) or 'an empty object'}"
        raise BadRow(where, f"expected exactly one of prompt, messages or turns, found {names}")
    if kinds == ["prompt"]:
        text = record["prompt"]
        if not isinstance(text, str) or not text:
            raise BadRow(where, f"prompt must be a non-empty string, found {shown(text)}")
        return Conversation(index, digest, where, [[]], text=text)
    chat = parse_conversation(record, where)
    for message in chat.messages:
        if message["role"] == "assistant":
            check_answer(message, where)
    steps = [[turn] for turn in chat.messages] if kinds == ["turns"] else [chat.messages]
    return Conversation(index, digest, where, steps, chat=chat.with_messages([]))


def engine_arguments(
    args: argparse.Namespace, reserved: Mapping[str, str] = RESERVED_ARGUMENTS
) -> dict[str, Any]:
    """Return the server's arguments for a command line, by their names in ``ServerArgs``.

    Args:
        reserved: the arguments that ``--engine-args`` may not set, and what to do instead.

    Raises:
        HyperDFlashConfigError: ``--engine-args`` sets one of them.
    """
    extra = json_object(args.engine_args, "--engine-args", QUOTED)
    for name in sorted(reserved.keys() & extra.keys()):
        raise HyperDFlashConfigError(
            "--engine-args: expected arguments that the command does not set itself, found "
            f"{name}. {reserved[name]}"
        )
    arguments = {"model_path": args.model, "dtype": args.dtype, "tp_size": args.tp}
    arguments["log_level"] = "info" if args.verbose else "error"
    if args.draft:
        arguments["speculative_algorithm"] = ALGORITHM
        arguments["speculative_draft_model_path"] = args.draft
    return arguments | extra


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the server arguments that must not change between two runs into one output."""
    extra = json_object(args.engine_args, "--engine-args", QUOTED)
    shaping = {name: extra[name] for name in sorted(extra.keys() - MEMORY_ONLY)}
    return {"dtype": args.dtype} | ({"engine_args": shaping} if shaping else {})


def check_draft(name: str) -> None:
    """Raise ``HyperDFlashConfigError`` for a drafter that cannot be read, before SGLang tries.

    That is a folder without a drafter's config, or neither a folder nor a hub id.
    """
    if Path(name).is_dir():
        load_config(name)
    elif not is_hub_id(name):
        raise HyperDFlashConfigError(
            f"--draft {name} is neither a folder nor a hub id (owner/name). Give the folder of a "
            "drafter."
        )


def run(args: argparse.Namespace) -> int:
    """Answer the prompts without an answer; print tau and tokens/s of this run at the end."""
    sampling = {name: getattr(args, name) for name in SAMPLING}
    arguments = engine_arguments(args)
    if args.draft:
        check_draft(args.draft)
    inputs = {"the target": args.model, "the input": args.input}
    keep_apart("--output", args.output, inputs | ({"the draft": args.draft} if args.draft else {}))
    prompts = Prompts("prompts", [args.input], parse_prompt, None, args.strict)
    settings = sampling | {"finished_only": args.finished_only} | engine_settings(args)
    settings |= {"model": location(args.model), "draft": args.draft and location(args.draft)}
    with hold_answers(args.output, KIND, settings, prompts) as answers:
        if not answers.left:
            return 0
        chats = load_chats(args.model)
        if any(prompt.text is None for prompt in answers.waiting()):
            chats.check({})  # before the model is loaded
        with start_server(arguments, verbose=args.verbose) as server:
            limit = int(server_info(server.url)["max_req_input_len"])
            pool = Pool({server.url: args.model})
            asker = Asker(pool, limit, chats, sampling, {}, args.finished_only)
            totals, started = Counter[str](), time.monotonic()
            fields = partial(record_fields, totals)
            written = asyncio.run(answers.add_all(asker, fields, args.concurrency))
            seconds, tokens = time.monotonic() - started, totals["completion_tokens"]
            line = f"{written} prompts, {tokens} tokens, {tokens / seconds:.1f} tokens/s"
            rounds = totals["verify_rounds"]
            tau = accept_length(totals["correct_drafts"], rounds)
            if tau is not None:
                line += f", tau {tau:.2f} over {rounds} verification rounds"
            print(line)
    return 0


def record_fields(
    totals: Counter[str], _messages: list[Message], replies: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return a record's outputs and counts, which are added to ``totals``."""
    metas = [reply["meta_info"] for reply in replies]
    counts = {
        "completion_tokens": sum(int(meta["completion_tokens"]) for meta in metas),
        "correct_drafts": sum(counters(meta)[0] for meta in metas),
        "verify_rounds": sum(counters(meta)[1] for meta in metas),
    }
    totals.update(counts)
    finish = metas[-1]["finish_reason"]["type"]
    return {"outputs": [r["text"] for r in replies], **counts, "finish_reason": finish}

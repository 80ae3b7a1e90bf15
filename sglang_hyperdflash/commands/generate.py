"""``hyperdflash generate``: answer a JSONL file offline through an ``sgl.Engine``.

Every input line gives one output line ``{"index", "outputs", ...}`` in order of completion. The
output file is append-only and is its own resume state: a line that was cut by a kill is dropped,
finished indices are skipped, so nothing is lost or doubled.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.tools.acceptance import accept_length, counters
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

Messages = list[dict[str, str]]


@dataclass(frozen=True)
class Prompt:
    """One input line: raw ``text`` (``prompt``), or ``turns`` of chat to be answered in order."""

    index: int
    digest: str
    text: str | None
    messages: Messages
    turns: list[str]


def parse_line(index: int, line: str) -> Prompt:
    """Parse one JSONL line with ``prompt``, ``messages`` or ``turns``.

    Raises:
        HyperDFlashConfigError: not JSON, none or several of the three, or of the wrong shape.
    """
    where = f"line {index + 1}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise HyperDFlashConfigError(f"{where} is not JSON: {error}.") from error
    kinds = ("prompt", "messages", "turns")
    given = [kind for kind in kinds if isinstance(record, dict) and kind in record]
    if len(given) != 1:
        raise HyperDFlashConfigError(
            f"{where} must be an object with exactly one of prompt, messages or turns; found "
            f"{given or type(record).__name__}."
        )
    value, kind = record[given[0]], given[0]
    digest = hashlib.sha256(line.encode()).hexdigest()[:16]
    if kind == "prompt" and isinstance(value, str) and value:
        return Prompt(index, digest, value, [], [])
    if kind == "turns" and value and _all(value, lambda turn: isinstance(turn, str)):
        return Prompt(index, digest, None, [], list(value))
    if kind == "messages" and value and _all(value, _is_message):
        return Prompt(index, digest, None, list(value), [])
    shapes = {
        "prompt": "a non-empty string",
        "turns": "a non-empty list of strings",
        "messages": "a non-empty list of {role, content} objects with text",
    }
    raise HyperDFlashConfigError(f"{where}: {kind} must be {shapes[kind]}.")


def _all(value: Any, accept) -> bool:
    return isinstance(value, list) and all(accept(item) for item in value)


def _is_message(item: Any) -> bool:
    return isinstance(item, dict) and all(isinstance(item.get(k), str) for k in ("role", "content"))


def read_prompts(path: Path) -> list[Prompt]:
    """Read and check the whole input before any model is loaded."""
    if not path.is_file():
        raise FileNotFoundError(f"--input {path} does not exist.")
    lines = path.read_text(encoding="utf-8").split("\n")
    prompts = [parse_line(i, line) for i, line in enumerate(lines) if line.strip()]
    if not prompts:
        raise HyperDFlashConfigError(f"--input {path} holds no prompts.")
    return prompts


def resume(path: Path, prompts: list[Prompt]) -> dict[int, dict]:
    """Read finished answers, dropping a last line cut by a kill; returns them by index.

    Raises:
        HyperDFlashConfigError: the file answers another input.
    """
    if not path.is_file():
        return {}
    digests = {prompt.index: prompt.digest for prompt in prompts}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    done: dict[int, dict] = {}
    # Not str.splitlines: an answer may hold U+2028 and its kind, which JSON leaves unescaped.
    for line in whole.splitlines():
        record = json.loads(line)
        if digests.get(record["index"]) != record["digest"]:
            raise HyperDFlashConfigError(
                f"--output {path} holds answers to another input (index {record['index']}). Choose "
                "another --output, or remove the file."
            )
        done[record["index"]] = record
    if len(whole) != len(content):
        with path.open("r+b") as out:
            out.truncate(len(whole))
    return done


def add_parser(commands) -> None:
    """Register ``generate`` and its arguments."""
    parser = commands.add_parser(
        "generate", help="answer a JSONL file offline", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--model", required=True, help="target folder or hub id")
    parser.add_argument("--draft", help="drafter; without it, no speculation")
    parser.add_argument("--input", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--max-new-tokens", type=int, default=512)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=-1)
    parser.add_argument("--min-p", type=float, default=0.0)
    parser.add_argument("--concurrency", type=int, default=16)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument(
        "--engine-args", default="{}", help="more sgl.Engine arguments, as a JSON object"
    )
    parser.set_defaults(run=run)


def json_option(name: str, text: str) -> dict[str, Any]:
    """A command-line option that holds a JSON object; anything else is an error naming it."""
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise HyperDFlashConfigError(f"{name} is not JSON: {error}.") from error
    if not isinstance(value, dict):
        raise HyperDFlashConfigError(f"{name} must be a JSON object.")
    return value


def engine_arguments(args: argparse.Namespace) -> dict[str, Any]:
    """The ``sgl.Engine`` keyword arguments of a command line."""
    extra = json_option("--engine-args", args.engine_args)
    arguments = {"model_path": args.model, "dtype": args.dtype, "tp_size": args.tp}
    arguments |= {"log_level": "error"}
    if args.draft:
        arguments |= {
            "speculative_algorithm": ALGORITHM,
            "speculative_draft_model_path": args.draft,
        }
    return arguments | extra


def run(args: argparse.Namespace) -> int:
    """Answer what is not answered yet; print tau and tokens/s of this run at the end."""
    if args.max_new_tokens < 1 or args.concurrency < 1:
        raise HyperDFlashConfigError("--max-new-tokens and --concurrency must be at least 1.")
    arguments = engine_arguments(args)
    prompts = read_prompts(args.input)
    args.output.parent.mkdir(parents=True, exist_ok=True)
    done = resume(args.output, prompts)
    waiting = [prompt for prompt in prompts if prompt.index not in done]
    print(f"{len(prompts)} prompts, {len(done)} already answered in {args.output}")
    if not waiting:
        return 0
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import sglang

    engine = sglang.Engine(**arguments)
    try:
        started = time.monotonic()
        records = engine.loop.run_until_complete(
            answer_all(engine, waiting, args, len(done), len(prompts))
        )
        print(summary(records, time.monotonic() - started))
    finally:
        engine.shutdown()
    return 0


async def answer_all(
    engine, waiting: list[Prompt], args: argparse.Namespace, done: int, total: int
) -> list[dict]:
    """Keep ``--concurrency`` prompts in flight; append each answer as it finishes."""
    from tqdm import tqdm

    queue: Iterator[Prompt] = iter(waiting)
    records: list[dict] = []
    bar = tqdm(total=total, initial=done, unit="prompt", dynamic_ncols=True)

    async def worker(out) -> None:
        for prompt in queue:
            record = await answer(engine, prompt, args)
            out.write((json.dumps(record, ensure_ascii=False) + "\n").encode())
            out.flush()
            records.append(record)
            bar.update(1)

    with args.output.open("ab") as out:
        await asyncio.gather(*(worker(out) for _ in range(min(args.concurrency, len(waiting)))))
    bar.close()
    return records


async def answer(engine, prompt: Prompt, args: argparse.Namespace) -> dict:
    """Answer one prompt; ``turns`` are asked in order, each seeing the answers before it."""
    tokenizer = engine.tokenizer_manager.tokenizer
    messages = list(prompt.messages)
    outputs, correct, rounds, tokens = [], 0, 0, 0
    for turn in prompt.turns or [None]:
        if turn is not None:
            messages.append({"role": "user", "content": turn})
        text = prompt.text
        if text is None:
            text = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
        result = await engine.async_generate(
            input_ids=tokenizer.encode(text, add_special_tokens=prompt.text is not None),
            sampling_params={
                "temperature": args.temperature,
                "top_p": args.top_p,
                "top_k": args.top_k,
                "min_p": args.min_p,
                "max_new_tokens": args.max_new_tokens,
            },
        )
        meta = result["meta_info"]
        accepted, verified, _ = counters(meta)
        correct, rounds = correct + accepted, rounds + verified
        tokens += int(meta["completion_tokens"])
        outputs.append(result["text"])
        messages.append({"role": "assistant", "content": result["text"]})
    return {
        "index": prompt.index,
        "digest": prompt.digest,
        "outputs": outputs,
        "completion_tokens": tokens,
        "correct_drafts": correct,
        "verify_rounds": rounds,
        "finish_reason": meta["finish_reason"]["type"],
    }


def summary(records: list[dict], seconds: float) -> str:
    """One line: prompts, tokens, tokens/s and, with speculation, tau."""
    tokens = sum(record["completion_tokens"] for record in records)
    rounds = sum(record["verify_rounds"] for record in records)
    line = f"{len(records)} prompts, {tokens} tokens, {tokens / seconds:.1f} tokens/s"
    if rounds:
        tau = accept_length(sum(record["correct_drafts"] for record in records), rounds)
        line += f", tau {tau:.2f} over {rounds} verification rounds"
    return line

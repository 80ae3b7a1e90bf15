"""``hyperdflash capture``: the target's states of a data set, through an SGLang server.

It is for targets that are too large for one process (DeepSeek-V4). Every conversation is prefilled
once, and a thread of the scheduler writes its pre-collapse residual to disk. Several engines may
fill one store at once, each with a share of the shards.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import shutil
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from tqdm import tqdm

from sglang_hyperdflash.commands import generate
from sglang_hyperdflash.commands.command_server import start_server
from sglang_hyperdflash.commands.pool import Pool, Refused, server_info
from sglang_hyperdflash.serving.capture_rows import REQUEST_PREFIX, RowReader
from sglang_hyperdflash.targets.chats import load_chats
from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles, model_dtype
from sglang_hyperdflash.targets.loaded import CAPTURE_FOLDER
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.ownership import keep_apart, location
from sglang_hyperdflash.training.conversations import Loaded, load_samples
from sglang_hyperdflash.training.rows import LeftOut
from sglang_hyperdflash.training.samples import Sample
from sglang_hyperdflash.training.store.identity import identity_of
from sglang_hyperdflash.training.store.manifest import SHARDS, Data, content_hash, data_digest
from sglang_hyperdflash.training.store.writer import (
    Range,
    StoreWriter,
    bytes_of,
    open_writer,
    shard_ranges,
)

KIND = "hyperdflash capture"
SHARDS_IN_MEMORY = 4  # shards that are prefilled or written at once
# Without the prefix cache, a hit of which would leave rows out.
FIXED_ARGUMENTS = {"enable_return_hidden_states": True, "disable_radix_cache": True}
NO_DRAFTER = "Leave it out: a capture runs the target alone."
ONE_NODE = "Another node's rows would stay there: run one --share I/N on each node instead."
RESERVED_ARGUMENTS = generate.RESERVED_ARGUMENTS | {
    "model_path": "Use --target.",
    "revision": "Leave it out: a capture uses a hub id's main revision.",
    "context_length": "Use --max-length.",
    "speculative_algorithm": NO_DRAFTER,
    "speculative_draft_model_path": NO_DRAFTER,
    **dict.fromkeys(FIXED_ARGUMENTS, "Leave it out: capture sets it."),
    **dict.fromkeys(("nnodes", "node_rank", "dist_init_addr"), ONE_NODE),
}
# Tokens of a context that SGLang reserves: its worker accepts inputs that are shorter than the
# context less 6 (managers/tp_worker.py, ``max_req_input_len``).
RESERVED_TOKENS = 7


def check_space(folder: Path, needed: int) -> None:
    """Print how many bytes will be written; raise ``HyperDFlashConfigError`` without the space."""
    folder.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(folder).free
    print(f"about {needed / 2**30:.2f} GiB to write, {free / 2**30:.1f} GiB free in {folder}")
    if needed > free:
        raise HyperDFlashConfigError(
            f"the capture needs about {needed / 2**30:.2f} GiB and {folder} has "
            f"{free / 2**30:.2f} GiB free; take fewer or shorter conversations, or another folder."
        )


def run(args: argparse.Namespace) -> int:
    """Capture what is not captured yet."""
    arguments = generate.engine_arguments(args, RESERVED_ARGUMENTS)
    for name in args.data:
        keep_apart("--out", args.out, {"the target": args.model, "the data": name})
    files = TargetFiles(args.model)
    facts = TargetFacts.from_config(files.config())
    # Resolved, so that the capture records the server's actual dtype.
    arguments["dtype"] = model_dtype(args.dtype, files.config())
    context = facts.max_position_embeddings
    max_length = min(args.max_length, context - RESERVED_TOKENS)
    if max_length < args.max_length:
        print(
            f"--max-length {args.max_length} is cut to {max_length}: the context is {context} "
            f"tokens, of which SGLang keeps {RESERVED_TOKENS}"
        )
    settings = {"max_length": max_length, "shard_mib": args.shard_mib, "share": list(args.share)}
    settings |= {"window": args.window} | generate.engine_settings(args)
    settings |= {"target": location(args.model), "data": list(map(content_hash, args.data))}
    name = args.writer or "capture-{}-of-{}".format(*args.share)
    identity = identity_of(files, arguments["dtype"], fp8=args.states_dtype == "fp8")
    with open_writer(args.out, identity, name, KIND, settings) as writer:
        left_out = LeftOut(args.strict)
        loaded = load_samples(args.data, load_chats(args.model), max_length, left_out)
        print(loaded)
        listed = args.out / f"{name}.left_out.jsonl"
        left_out.report(listed)
        captured = _capture(args, arguments, writer, loaded)
        not_finite = writer.left_out
        for i in not_finite:
            left_out.add(loaded.rows[i], loaded.places[i], "NaN or infinite states")
        if not_finite:
            left_out.report(listed)
    if not_finite and not captured:
        raise left_out.nothing_usable("--data", "Check the target's weights and --dtype.")
    return 0


def _capture(
    args: argparse.Namespace, arguments: dict[str, Any], writer: StoreWriter, loaded: Loaded
) -> int:
    """Capture the missing shards of this share; return the samples in all of its shards."""
    for name in writer.damaged:
        print(f"{args.out / SHARDS / name} is missing or damaged: it is captured again")
    samples, window = loaded.samples, args.window
    if window:
        samples = [sample.after(max(sample.spans[0][0] - window, 0)) for sample in samples]
    budget = args.budget and int(args.budget * 2**30)
    data = Data(data_digest(samples), len(samples), args.shard_mib << 20, budget, window)
    part, parts = args.share
    ranges = shard_ranges(samples, writer.identity, data.shard_bytes)
    sizes = [sum(bytes_of(s, writer.identity) for s in samples[a:b]) for a, b in ranges]
    if budget and budget < (least := 4 * parts * max(sizes)):
        raise HyperDFlashConfigError(
            f"--budget: expected at least {least / 2**30:.3g} GiB, four shards of every share, "
            f"found {args.budget:g}. Raise it, or lower --shard-mib."
        )
    writer.begin(data)
    size_of, ranges = dict(zip(ranges, sizes, strict=True)), ranges[part - 1 :: parts]
    missing = writer.missing(ranges)
    shards = "1 shard" if len(ranges) == 1 else f"{len(ranges)} shards"
    print(f"{shards}, {len(ranges) - len(missing)} already in {args.out}")
    if args.begin:
        return len(samples)
    if missing:
        missing = {each: size_of[each] for each in missing}
        budget = budget and budget // parts
        room = max(budget - writer.size, 0) if budget else math.inf
        check_space(args.out, min(sum(missing.values()), room))
        # Local: rows that are read and removed within seconds need not reach a shared disk.
        with TemporaryDirectory(prefix="hyperdflash-", ignore_cleanup_errors=True) as scratch:
            given = args, loaded, samples, missing, writer, budget
            _with_server(arguments, Path(scratch), *given)
    count = sum(end - start for start, end in ranges) - len(writer.left_out)
    print(f"{count} samples in {shards} ({args.out})")
    return count


def _with_server(arguments, scratch: Path, args, loaded, samples, missing, writer, budget) -> None:
    environment = {CAPTURE_FOLDER: str(scratch.resolve())}
    arguments = arguments | FIXED_ARGUMENTS
    with start_server(arguments, verbose=args.verbose, environment=environment) as server:
        check_fits(loaded, int(server_info(server.url)["max_req_input_len"]))
        pool = Pool({server.url: args.model}, attempts=1)  # rows of two attempts would add up
        given = pool, RowReader(scratch), loaded, samples, missing, writer, args.concurrency
        asyncio.run(capture_shards(*given, budget))


async def capture_shards(
    pool: Pool,
    reader: RowReader,
    loaded: Loaded,
    samples: list[Sample],
    ranges: Mapping[Range, int],
    writer: StoreWriter,
    concurrency: int,
    budget: int | None = None,
) -> None:
    """Prefill and add every range; while some shards are written, the next is prefilled.

    Args:
        samples: the ends of the loaded ones that are stored.
        ranges: the bytes of every range.
        concurrency: the number of conversations in flight.
        budget: bytes of shards that may be there, until a training has used some; None for all.

    Raises:
        HyperDFlashError: the server refuses a conversation, or rows are missing.
    """
    shards_in_memory = asyncio.Semaphore(SHARDS_IN_MEMORY)
    in_flight = asyncio.Semaphore(concurrency)

    async def prefill(index: int) -> torch.Tensor:
        tokens, count = loaded.samples[index].tokens, len(samples[index].tokens)
        rid = f"{REQUEST_PREFIX}{index}-{len(tokens) - count}"
        sampling = {"temperature": 0, "max_new_tokens": 1}
        async with in_flight:
            try:
                await pool.ask(
                    input_ids=tokens, sampling_params=sampling, return_hidden_states=True, rid=rid
                )
            except Refused as error:
                raise HyperDFlashConfigError(
                    f"{loaded.places[index]}: the server refuses the conversation: {error}. Fix or "
                    "remove it, and capture into another --out."
                ) from error
            return await reader.take(rid, count)

    under_way, in_order = 0, asyncio.Lock()

    async def room(size: int) -> None:
        """Wait for a shard's room, in the order of the data: a training needs the first first."""
        nonlocal under_way
        async with in_order:
            while budget and not writer.make_room(under_way + size, budget):
                bar.set_postfix_str("waiting for the training to use what is there")
                await asyncio.sleep(1)
            bar.set_postfix_str("")
            under_way += size

    async def capture_shard(start: int, end: int) -> None:
        nonlocal under_way
        async with shards_in_memory:
            await room(ranges[start, end])
            residuals = await asyncio.gather(*map(prefill, range(start, end)))
            states = [(residual,) for residual in residuals]
            await asyncio.to_thread(writer.add, start, samples[start:end], states)
            under_way -= ranges[start, end]
            bar.update(1)

    with tqdm(total=len(ranges), unit="shard") as bar:
        try:
            async with pool, asyncio.TaskGroup() as shards:
                for start, end in ranges:
                    shards.create_task(capture_shard(start, end))
        except ExceptionGroup as errors:
            error = errors.exceptions[0]
            raise error from error.__cause__


def check_fits(loaded: Loaded, max_req_input_len: int) -> None:
    """Raise ``HyperDFlashConfigError`` if the longest conversation exceeds the server's K/V pool.

    Args:
        max_req_input_len: the server's: the most tokens of a prompt, plus one.
    """
    lengths = [len(sample.tokens) for sample in loaded.samples]
    longest = max(lengths)
    if longest >= max_req_input_len:
        where, max_tokens = loaded.places[lengths.index(longest)], max_req_input_len - 1
        raise HyperDFlashConfigError(
            f"{where} has {longest} tokens; the server's K/V pool holds {max_tokens} of a "
            f"conversation. Repeat with --max-length {max_tokens} into a new --out, or give the "
            "server more memory (--engine-args '{\"max_total_tokens\": N}')."
        )

"""``hyperdflash capture``: the target's states of a data set, through an SGLang server.

For targets too large for one process (DeepSeek-V4): every conversation is prefilled
once, and a hook in the scheduler hands out its pre-collapse residual. Several engines may write to
one store at once, each a share of the shards.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from sglang_hyperdflash.commands.capture_rows import REQUEST_PREFIX, take_rows
from sglang_hyperdflash.commands.generate import OWN, engine_arguments, engine_settings
from sglang_hyperdflash.commands.own_server import own_server
from sglang_hyperdflash.commands.pool import Pool, Refused, server_info
from sglang_hyperdflash.targets.chats import load_chats
from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles, model_dtype
from sglang_hyperdflash.targets.loaded import CAPTURE_FOLDER
from sglang_hyperdflash.tools.command_line import COUNT
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, HyperDFlashError
from sglang_hyperdflash.tools.ownership import keep_apart, location
from sglang_hyperdflash.training.conversations import Loaded, load_samples
from sglang_hyperdflash.training.rows import SOURCES, STRICT, LeftOut
from sglang_hyperdflash.training.samples import Sample
from sglang_hyperdflash.training.store.identity import identity_of
from sglang_hyperdflash.training.store.manifest import (
    SHARDS,
    Data,
    content_hash,
    data_digest,
)
from sglang_hyperdflash.training.store.writer import (
    Range,
    StoreWriter,
    bytes_of,
    open_writer,
    shard_ranges,
)

KIND = "hyperdflash capture"
# Being prefilled or written.
SHARDS_IN_MEMORY = 4
# A prefix-cache hit would leave rows out; all must be computed.
FIXED = {"enable_return_hidden_states": True, "disable_radix_cache": True}
NO_DRAFTER = "Leave it out: a capture runs the target alone."
CAPTURE_OWN = OWN | {
    "model_path": "Use --target.",
    "revision": "Leave it out: a capture uses a hub id's main revision.",
    "context_length": "Use --max-length.",
    "speculative_algorithm": NO_DRAFTER,
    "speculative_draft_model_path": NO_DRAFTER,
    **dict.fromkeys(FIXED, "Leave it out: capture sets it."),
}
# What SGLang reserves of a context: its worker accepts inputs shorter than the context less 6
# (managers/tp_worker.py, ``max_req_input_len``).
KEPT = 7


def add_parser(commands) -> None:
    """Register ``capture`` and its arguments."""
    parser = commands.add_parser(
        "capture",
        help="write the target's states of a data set, through SGLang",
        description="Prefill every conversation with an SGLang server and keep the pre-collapse "
        'residual, in a store for `hyperdflash train` (features = "captured"). Run again to '
        "resume. Several engines fill one store, each run with its own --share.",
    )
    add = parser.add_argument
    add("--target", dest="model", required=True, help="target folder or hub id")
    add("--data", nargs="+", required=True, help=f"chat data: {SOURCES}")
    add("--strict", action="store_true", help=STRICT)
    add("--out", type=Path, required=True, help="folder of the store")
    add(
        "--share",
        type=share,
        default="1/1",
        metavar="I/N",
        help="capture the I-th of N parts of the data, while others capture the rest",
    )
    add(
        "--writer",
        type=writer_name,
        help="name of this run in the store (default: its share); another data set needs another",
    )
    add(
        "--max-length",
        type=COUNT,
        default=4096,
        help="tokens; answers that end later are left out, and a conversation of such answers "
        "alone is listed; less if the target's "
        "context is shorter",
    )
    add(
        "--states-dtype",
        choices=("auto", "fp8"),
        default="auto",
        help="of the stored states: the target's own, or float8_e4m3fn with a scale for each token "
        "and path, half of bf16's size",
    )
    add("--shard-mib", type=COUNT, default=1024, help="largest size of a shard, MiB")
    add("--concurrency", type=COUNT, default=16, help="conversations in flight")
    add("--dtype", default="auto", help="dtype of the weights, as SGLang's --dtype")
    add("--tp", type=COUNT, default=1, help="GPUs that share the model")
    add("--engine-args", default="{}", help="more of SGLang's server arguments, as a JSON object")
    add("--verbose", action="store_true", help="show what SGLang and its libraries print")
    parser.set_defaults(run=run, draft=None)


def check_space(folder: Path, needed: int) -> None:
    """Print how much will be written; refuse what does not fit."""
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
    arguments = engine_arguments(args, CAPTURE_OWN)
    for name in args.data:
        keep_apart("--out", args.out, {"the target": args.model, "the data": name})
    files = TargetFiles(args.model)
    facts = TargetFacts.from_config(files.config())
    # Resolved, so that the capture records the server's actual dtype.
    arguments["dtype"] = model_dtype(args.dtype, files.config())
    context = facts.max_position_embeddings
    limit = min(args.max_length, context - KEPT)
    if limit < args.max_length:
        print(
            f"--max-length {args.max_length} is cut to {limit}: the context is {context} tokens, "
            f"of which SGLang keeps {KEPT}"
        )
    settings = {"max_length": limit, "shard_mib": args.shard_mib, "share": list(args.share)}
    settings |= engine_settings(args)
    settings |= {"target": location(args.model), "data": list(map(content_hash, args.data))}
    name = args.writer or "capture-{}-of-{}".format(*args.share)
    identity = identity_of(files, arguments["dtype"], fp8=args.states_dtype == "fp8")
    with open_writer(args.out, identity, name, KIND, settings) as writer:
        left_out = LeftOut(args.strict)
        loaded = load_samples(args.data, load_chats(args.model), limit, left_out)
        print(loaded)
        listed = args.out / f"{name}.left_out.jsonl"
        left_out.report(listed)
        usable = _capture(args, arguments, writer, loaded)
        broken = writer.left_out
        for i in broken:
            left_out.add(loaded.rows[i], loaded.places[i], "NaN or infinite states")
        if broken:
            left_out.report(listed)
    if broken and not usable:
        raise left_out.nothing_usable("--data", "Check the target's weights and --dtype.")
    return 0


def share(text: str) -> tuple[int, int]:
    """``I/N`` of the command line, from ``1/N`` to ``N/N``."""
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"expected I/N with I from 1 to N, found {text}")
    return int(part), int(parts)


def writer_name(text: str) -> str:
    """A ``--writer``: part of the names of files."""
    if not re.fullmatch(r"\w[\w.-]*", text):
        raise argparse.ArgumentTypeError(f"expected letters, digits, _, - and ., found {text!r}")
    return text


def _capture(
    args: argparse.Namespace, arguments: dict[str, Any], writer: StoreWriter, loaded: Loaded
) -> int:
    for name in writer.damaged:
        print(f"{args.out / SHARDS / name} is missing or damaged: it is captured again")
    data = Data(data_digest(loaded.samples), len(loaded.samples), args.shard_mib << 20)
    writer.begin(data)
    part, parts = args.share
    ranges = shard_ranges(loaded.samples, writer.identity, data.shard_bytes)[part - 1 :: parts]
    waiting = writer.missing(ranges)
    print(f"{_shards(len(ranges))}, {len(ranges) - len(waiting)} already in {args.out}")
    if waiting:
        left = [s for start, end in waiting for s in loaded.samples[start:end]]
        check_space(args.out, sum(bytes_of(s, writer.identity) for s in left))
        # Local: rows that are read and removed within seconds need not reach a shared disk.
        with TemporaryDirectory(prefix="hyperdflash-", ignore_cleanup_errors=True) as scratch:
            _with_server(arguments, Path(scratch), args, loaded, waiting, writer)
    count = sum(end - start for start, end in ranges) - len(writer.left_out)
    print(f"{count} samples in {_shards(len(ranges))} ({args.out})")
    return count


def _shards(count: int) -> str:
    return "1 shard" if count == 1 else f"{count} shards"


def _with_server(arguments, scratch: Path, args, loaded, waiting, writer) -> None:
    environment = {CAPTURE_FOLDER: str(scratch.resolve())}
    starting = own_server(arguments | FIXED, verbose=args.verbose, environment=environment)
    with starting as server:
        check_fits(loaded, int(server_info(server.url)["max_req_input_len"]))
        in_flight = asyncio.Semaphore(args.concurrency)
        pool = Pool({server.url: args.model}, attempts=1)  # rows of two attempts would add up
        prefill = Prefill(pool, loaded.places, scratch, in_flight)
        asyncio.run(capture_shards(prefill, loaded.samples, waiting, writer))


async def capture_shards(
    prefill: Prefill, samples: list[Sample], waiting: list[Range], writer: StoreWriter
) -> None:
    """Prefill and add every range; while some shards are written, the next is prefilled."""
    from tqdm import tqdm

    async def one(start: int, end: int) -> None:
        chosen = samples[start:end]
        rows = await asyncio.gather(*map(prefill, range(start, end), chosen))
        await asyncio.to_thread(writer.add, start, chosen, [(each,) for each in rows])
        bar.update(1)

    pending: set[asyncio.Task] = set()

    async def until(most: int) -> None:
        nonlocal pending
        while len(pending) > most:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            # Of all of them: asyncio prints a traceback of an error that nothing asked for.
            for error in filter(None, [task.exception() for task in done]):
                raise error

    async with prefill.pool:
        try:
            with tqdm(total=len(waiting), unit="shard") as bar:
                for start, end in waiting:
                    await until(SHARDS_IN_MEMORY - 1)
                    pending.add(asyncio.create_task(one(start, end)))
                await until(0)
        finally:  # an interrupt leaves some, whose session closes
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)


def check_fits(loaded: Loaded, limit: int) -> None:
    """Refuse conversations that exceed the server's K/V pool, before any is captured.

    Args:
        limit: ``max_req_input_len`` of the server.

    Raises:
        HyperDFlashConfigError: the longest one is too long.
    """
    lengths = [len(sample.tokens) for sample in loaded.samples]
    if max(lengths) >= limit:
        where = loaded.places[lengths.index(max(lengths))]
        raise HyperDFlashConfigError(
            f"{where} has {max(lengths)} tokens; the server's K/V pool holds {limit - 1} of a "
            f"conversation. Repeat with --max-length {limit - 1} into a new --out, or give the "
            "server more memory (--engine-args '{\"max_total_tokens\": N}')."
        )


@dataclass(frozen=True)
class Prefill:
    """Has conversations prefilled by a server, so many at once.

    Attributes:
        places: the ``file:line`` of every sample.
    """

    pool: Pool
    places: Sequence[str]
    scratch: Path
    in_flight: asyncio.Semaphore

    async def __call__(self, index: int, sample: Sample) -> torch.Tensor:
        """The residual ``[S, m*d]`` of a sample, in the server's dtype.

        Raises:
            HyperDFlashConfigError: the server refuses it. HyperDFlashError: rows are missing.
        """
        rid = f"{REQUEST_PREFIX}{index}"
        async with self.in_flight:
            try:
                await self.pool.ask(
                    input_ids=sample.tokens,
                    sampling_params={"temperature": 0, "max_new_tokens": 1},
                    return_hidden_states=True,
                    rid=rid,
                )
            except Refused as error:
                raise HyperDFlashConfigError(
                    f"{self.places[index]}: the server refuses the conversation: {error}. Fix or "
                    "remove it, and capture into another --out."
                ) from error
            rows = await asyncio.to_thread(take_rows, self.scratch, rid)
        found = 0 if rows is None else len(rows)
        if found != len(sample.tokens):
            free = shutil.disk_usage(self.scratch).free / 2**20
            raise HyperDFlashError(
                f"expected {len(sample.tokens)} residual rows of a conversation in {self.scratch}, "
                f"found {found}; {free:.0f} MiB are free there. On a full disk, free space or set "
                "TMPDIR, and run the same command again: finished shards are kept. Else SGLang's "
                "hidden-state seam has changed: run `hyperdflash check`."
            )
        return rows

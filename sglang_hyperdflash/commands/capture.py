"""``hyperdflash capture``: the target's states of a data set, through an SGLang server.

For targets too large for one process (DeepSeek-V4): every conversation is prefilled
once, and a hook in the scheduler writes its pre-collapse residual to disk. The final-norm state is
computed from the residual with the target's ``hc_head``, or its mean, and norm.
"""

from __future__ import annotations

import argparse
import asyncio
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sglang_hyperdflash.commands.answers import write_skipped
from sglang_hyperdflash.commands.capture_rows import REQUEST_PREFIX, take_rows
from sglang_hyperdflash.commands.generate import OWN, engine_arguments, engine_settings
from sglang_hyperdflash.commands.own_server import own_server
from sglang_hyperdflash.commands.pool import ask, server_info
from sglang_hyperdflash.draft.hc_head import tensors_fingerprint
from sglang_hyperdflash.targets.chats import load_chats
from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles, model_dtype
from sglang_hyperdflash.targets.loaded import CAPTURE_FOLDER
from sglang_hyperdflash.tools.command_line import COUNT
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, HyperDFlashError
from sglang_hyperdflash.tools.ownership import claim, keep_apart, location
from sglang_hyperdflash.tools.server_process import Server
from sglang_hyperdflash.training.captured import (
    CaptureIdentity,
    CaptureWriter,
    bytes_of,
    content_hash,
    data_digest,
    shard_ranges,
)
from sglang_hyperdflash.training.conversations import Loaded, load_samples
from sglang_hyperdflash.training.samples import Sample, States

KIND = "hyperdflash capture"
LEFT_OUT = "left_out.jsonl"
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


class FinalState:
    """From a captured residual to the target's final-norm state."""

    def __init__(self, files: TargetFiles, facts: TargetFacts) -> None:
        self.facts = facts
        m, d = facts.hc_mult, facts.hidden_size
        self.gate = files.hc_head(m, d)
        if self.gate is None:
            raise HyperDFlashConfigError(
                f"target {files.name} ({files.kind.name}) has no hc_head, so its final state "
                "cannot be computed from the residual; capture is for targets with an hc_head."
            )
        self.fingerprint = self.gate.fingerprint()
        self.norm = files.tensor("norm")

    def states(self, residual: torch.Tensor) -> States:
        """States of one sample from its residual ``[S, m*d]``, in the residual's dtype."""
        f = self.facts
        eps = {"rms_eps": f.rms_norm_eps, "hc_eps": f.hc_eps}
        y = self.gate.collapse(residual, **eps).float()
        final = torch.nn.functional.rms_norm(y, self.norm.shape, self.norm, f.rms_norm_eps)
        return States.without_layers(residual.unsqueeze(0), final.to(residual.dtype).unsqueeze(0))


def add_parser(commands) -> None:
    """Register ``capture`` and its arguments."""
    parser = commands.add_parser(
        "capture",
        help="write the target's states of a data set, through SGLang",
        description="Prefill every conversation with an SGLang server and keep the pre-collapse "
        "residual and the final-norm state, as shards for `hyperdflash train` (features = "
        '"captured"). Run again to resume.',
    )
    add = parser.add_argument
    add("--target", dest="model", required=True, help="target folder or hub id")
    add("--data", nargs="+", required=True, help="chat JSONL files, or hub:OWNER/NAME")
    add("--out", type=Path, required=True, help="folder for the shards")
    add(
        "--max-length",
        type=COUNT,
        default=4096,
        help="tokens; longer conversations are left out and listed; less if the target's "
        "context is shorter",
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
    settings = {"max_length": limit, "shard_mib": args.shard_mib}
    settings |= engine_settings(args)
    settings |= {"target": location(args.model), "data": list(map(content_hash, args.data))}
    with claim(args.out, KIND, settings):
        loaded = load_samples(args.data, load_chats(args.model), limit)
        print(loaded)
        entries = [(where, f"over {limit} tokens") for where in loaded.too_long]
        entries += [(where, "no answer") for where in loaded.without_answer]
        skipped = [{"where": where, "reason": reason} for where, reason in entries]
        write_skipped(args.out / LEFT_OUT, skipped, "left out")
        return _capture(args, arguments, files, facts, loaded)


def _capture(
    args: argparse.Namespace,
    arguments: dict[str, Any],
    files: TargetFiles,
    facts: TargetFacts,
    loaded: Loaded,
) -> int:
    final_state = FinalState(files, facts)
    m, d = facts.hc_mult, facts.hidden_size
    dtype = arguments["dtype"]
    itemsize = getattr(torch, dtype).itemsize
    identity = CaptureIdentity(
        facts.architecture,
        final_state.fingerprint,
        tensors_fingerprint(final_state.norm),
        m,
        d,
        dtype,
        data_digest(loaded.samples),
    )
    writer = CaptureWriter(args.out, identity)
    for name in writer.damaged:
        print(f"{args.out / name} is damaged: it is captured again")
    ranges = shard_ranges(loaded.samples, m, d, itemsize, args.shard_mib << 20)
    waiting = [r for r in ranges if not writer.has(*r)]
    print(f"{_shards(len(ranges))}, {len(ranges) - len(waiting)} already in {args.out}")
    if waiting:
        left = [s for start, end in waiting for s in loaded.samples[start:end]]
        check_space(args.out, sum(bytes_of(s, m, d, itemsize) for s in left))
        with _scratch(args.out) as scratch:
            _with_server(arguments, scratch, args, loaded, waiting, final_state, writer)
    print(f"{len(loaded.samples)} samples in {_shards(len(ranges))} ({args.out})")
    return 0


def _shards(count: int) -> str:
    return "1 shard" if count == 1 else f"{count} shards"


@contextmanager
def _scratch(out: Path) -> Iterator[Path]:
    """A folder for rows before they are in a shard, emptied of a killed run's."""
    folder = out / ".scratch"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _with_server(arguments, scratch: Path, args, loaded, waiting, final_state, writer) -> None:
    from tqdm import tqdm

    environment = {CAPTURE_FOLDER: str(scratch.resolve())}
    starting = own_server(arguments | FIXED, verbose=args.verbose, environment=environment)
    with starting as server:
        check_fits(loaded, int(server_info(server.url)["max_req_input_len"]))
        for start, end in tqdm(waiting, unit="shard"):
            chosen = loaded.samples[start:end]
            residuals = asyncio.run(prefill_all(server, scratch, chosen, start, args.concurrency))
            writer.add(start, chosen, [final_state.states(rows) for rows in residuals])


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


async def prefill_all(
    server: Server, scratch: Path, samples: list[Sample], start: int, concurrency: int
) -> list[torch.Tensor]:
    """The residual ``[S, m*d]`` of every sample, ``concurrency`` requests in flight."""
    in_flight = asyncio.Semaphore(concurrency)

    async def one(index: int, sample: Sample) -> torch.Tensor:
        rid = f"{REQUEST_PREFIX}{index}"
        async with in_flight:
            await ask(
                server.url,
                input_ids=sample.tokens,
                sampling_params={"temperature": 0, "max_new_tokens": 1},
                return_hidden_states=True,
                rid=rid,
            )
        rows = take_rows(scratch, rid)
        found = 0 if rows is None else len(rows)
        if found != len(sample.tokens):
            free = shutil.disk_usage(scratch).free / 2**20
            raise HyperDFlashError(
                f"expected {len(sample.tokens)} residual rows of a conversation in {scratch}, "
                f"found {found}; {free:.0f} MiB are free there. On a full disk, free space and run "
                "the same command again: finished shards are kept. Else SGLang's hidden-state seam "
                "has changed: run `hyperdflash check`."
            )
        return rows

    return await asyncio.gather(*(one(start + i, sample) for i, sample in enumerate(samples)))

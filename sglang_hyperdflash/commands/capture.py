"""``hyperdflash capture``: the target's states of a data set, through SGLang's own engine.

What a single process cannot hold (DeepSeek-V4) an SGLang node can: every conversation is prefilled
once, and a hook in the scheduler writes its pre-collapse residual to disk. The final-norm state is
computed from the residual with the target's ``hc_head``, or its mean, and norm.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import tempfile
from pathlib import Path

import torch

from sglang_hyperdflash.commands.generate import engine_arguments
from sglang_hyperdflash.draft.hc_head import tensors_fingerprint
from sglang_hyperdflash.serving.capture_rows import CAPTURE_FOLDER, REQUEST_PREFIX, take_rows
from sglang_hyperdflash.targets.files import TargetFacts, TargetFiles
from sglang_hyperdflash.targets.kinds import constant_gate
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.training.captured import (
    CaptureIdentity,
    CaptureWriter,
    bytes_of,
    data_digest,
    shard_ranges,
)
from sglang_hyperdflash.training.conversations import load_samples
from sglang_hyperdflash.training.samples import Sample, States


class FinalState:
    """From a captured residual to the target's final-norm state."""

    def __init__(self, files: TargetFiles, facts: TargetFacts) -> None:
        self.facts = facts
        m, d = facts.hc_mult, facts.hidden_size
        own = files.hc_head(m, d)
        self.fingerprint = None if own is None else own.fingerprint()
        mean = files.kind.start == "constant"
        self.gate = constant_gate(m, d, facts.hc_eps) if mean else own
        if self.gate is None:
            raise HyperDFlashConfigError(
                f"target {files.name} ({files.kind.name}) has no hc_head and no mean, so its final "
                "state cannot be computed from the residual; capture is for targets with either."
            )
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
        description="Prefill every conversation with an SGLang engine and keep the pre-collapse "
        "residual and the final-norm state, as shards for `hyperdflash train` (features = "
        '"captured"). Run again to resume.',
    )
    add = parser.add_argument
    add("--target", dest="model", required=True, help="target folder or hub id")
    add("--data", nargs="+", required=True, help="chat JSONL files, or hub:OWNER/NAME")
    add("--out", type=Path, required=True, help="folder for the shards")
    add("--max-length", type=int, default=4096, help="longer conversations are left out")
    add("--shard-mib", type=int, default=1024)
    add("--concurrency", type=int, default=16)
    add("--dtype", default="auto")
    add("--tp", type=int, default=1)
    add("--engine-args", default="{}", help="more sgl.Engine arguments, as a JSON object")
    parser.set_defaults(run=run, draft=None)


def check_space(folder: Path, needed: int) -> None:
    """Say how much will be written; refuse what does not fit."""
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
    from transformers import AutoTokenizer

    if args.concurrency < 1 or args.shard_mib < 1:
        raise HyperDFlashConfigError("--concurrency and --shard-mib must be at least 1.")
    arguments = engine_arguments(args)
    files = TargetFiles(args.model)
    facts = TargetFacts.from_config(files.config())
    final_state = FinalState(files, facts)
    loaded = load_samples(args.data, AutoTokenizer.from_pretrained(args.model), args.max_length)
    print(loaded)
    m, d = facts.hc_mult, facts.hidden_size
    itemsize = 4 if args.dtype == "float32" else 2
    identity = CaptureIdentity(
        facts.architecture,
        final_state.fingerprint,
        tensors_fingerprint(final_state.norm),
        m,
        d,
        args.dtype,
        data_digest(loaded.samples),
    )
    writer = CaptureWriter(args.out, identity)
    ranges = shard_ranges(loaded.samples, m, d, itemsize, args.shard_mib << 20)
    waiting = [r for r in ranges if not writer.has(*r)]
    print(f"{len(ranges)} shards, {len(ranges) - len(waiting)} already in {args.out}")
    if not waiting:
        return 0
    left = [s for start, end in waiting for s in loaded.samples[start:end]]
    check_space(args.out, sum(bytes_of(s, m, d, itemsize) for s in left))
    with tempfile.TemporaryDirectory(dir=args.out) as scratch:
        _with_engine(arguments, Path(scratch), args, loaded.samples, waiting, final_state, writer)
    return 0


def _with_engine(arguments, scratch: Path, args, samples, waiting, final_state, writer) -> None:
    os.environ[CAPTURE_FOLDER] = str(scratch)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import sglang
    from tqdm import tqdm

    # A prefix hit would leave its rows out; the whole row must be computed.
    fixed = {"enable_return_hidden_states": True, "disable_radix_cache": True}
    engine = sglang.Engine(**(arguments | fixed))
    try:
        for start, end in tqdm(waiting, unit="shard"):
            chosen = samples[start:end]
            work = prefill_all(engine, scratch, chosen, start, args.concurrency)
            residuals = engine.loop.run_until_complete(work)
            writer.add(start, chosen, [final_state.states(rows) for rows in residuals])
    finally:
        engine.shutdown()
        os.environ.pop(CAPTURE_FOLDER)


async def prefill_all(
    engine, scratch: Path, samples: list[Sample], start: int, concurrency: int
) -> list[torch.Tensor]:
    """The residual ``[S, m*d]`` of every sample, ``concurrency`` requests in flight."""
    gate = asyncio.Semaphore(concurrency)

    async def one(index: int, sample: Sample) -> torch.Tensor:
        rid = f"{REQUEST_PREFIX}{index}"
        async with gate:
            await engine.async_generate(
                input_ids=sample.tokens,
                sampling_params={"temperature": 0, "max_new_tokens": 1},
                return_hidden_states=True,
                rid=rid,
            )
        rows = take_rows(scratch, rid)
        found = 0 if rows is None else len(rows)
        if found != len(sample.tokens):
            raise RuntimeError(
                f"SGLang wrote {found} residual rows for a conversation of {len(sample.tokens)} "
                "tokens; its hidden-state seam has changed."
            )
        return rows

    return await asyncio.gather(*(one(start + i, sample) for i, sample in enumerate(samples)))

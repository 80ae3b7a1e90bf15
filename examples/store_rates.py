"""How fast a store of synthetic states is opened and read, against the disk it lies on.

    python examples/store_rates.py --folder /data/rates --shards 12000 --samples 125 --tokens 1000

makes 12,000 shards of 1.5 billion tokens with states of ``--paths`` times ``--width`` (9 GB at the
default 1 x 1, for start-up and memory; 4 x 4096 for a rate as in training), and prints one JSON
line. The folder is kept, and used again by the next call with the same sizes.

``start_seconds`` and ``memory_mib`` are those of one reader that looks at every sample's tokens;
``read_mib_s`` of the reader, in random batches, prefetched as the trainer does; ``disk_mib_s`` of
plain reads of the same bytes, 16 MiB at a time by as many threads. Both start without the file
system's cache.

With ``--target`` the states have a target's sizes and identity. Then ``--draft`` may be trained on
them, by torchrun, again without the cache: ``data_wait`` is the share of its ``--steps`` that the
main process waits for data, ``trained_samples_s`` the rate of all ``--processes``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from sglang_hyperdflash.commands.capture import identity_of
from sglang_hyperdflash.targets.files import TargetFiles
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.training.samples import Passes, Sample
from sglang_hyperdflash.training.store.manifest import SHARDS, Data, Identity
from sglang_hyperdflash.training.store.reader import THREADS, StoreReader
from sglang_hyperdflash.training.store.writer import bytes_of, open_writer
from sglang_hyperdflash.training.trainer import AHEAD, LOG

KIND = "store rates"
PIECE = 16 << 20
TRAINING = """
target = {target}
draft = {draft}
out = "out"
features = "captured"

[[stage]]
data = [{store}]
steps = {steps}
batch = {batch}
anchors = 8
every = {steps}
bf16 = false
"""


def make(args: argparse.Namespace) -> None:
    """Write the shards that are missing."""
    sizes = {name: getattr(args, name) for name in ("shards", "samples", "tokens")}
    fp8 = args.states_dtype == "fp8"
    if args.target is None:
        identity = Identity("synthetic", None, "none", args.paths, args.width, "bfloat16", fp8=fp8)
    else:
        identity = identity_of(TargetFiles(str(args.target)), "bfloat16", fp8=fp8)
    sample = Sample(list(range(args.tokens)), ((args.tokens // 2, args.tokens),))
    samples = [sample] * args.samples
    width = identity.hc_mult * identity.hidden_size
    states = [(torch.randn(args.tokens, width).bfloat16(),)] * args.samples
    ranges = [(i * args.samples, (i + 1) * args.samples) for i in range(args.shards)]
    with open_writer(args.folder, identity, "rates", KIND, sizes) as writer:
        writer.begin(Data("synthetic", args.shards * args.samples, 1))
        for start, _ in writer.missing(ranges):
            writer.add(start, samples, states)
    StoreReader(args.folder).states([0])  # the reading below is of a store that is known


def drop_cache(folder: Path) -> None:
    """Take a store's shards out of the file system's cache."""
    for path in (folder / SHARDS).iterdir():
        with path.open("rb") as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def resident_mib() -> float:
    """What this process has in memory, mapped files included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def opened(folder: Path) -> dict[str, float]:
    """Start-up and memory of one reader; in a process of its own."""
    before, started = resident_mib(), time.monotonic()
    source = StoreReader(folder)
    seconds = time.monotonic() - started
    tokens = sum(int(sample.tokens[-1] >= 0) * len(sample.tokens) for sample in source.samples)
    return {
        "start_seconds": round(seconds, 3),
        "memory_mib": round(resident_mib() - before, 1),
        "tokens": tokens,
        "samples": len(source.samples),
    }


def read(folder: Path, batches: int, batch: int) -> dict[str, float]:
    """The rate of a reader in random batches; every shard is verified before."""
    source = StoreReader(folder)
    passes = Passes(len(source.samples), batch, seed=0)
    wanted = [passes.batch(step) for step in range(batches)]
    for number in {source.place(i)[0] for indices in wanted for i in indices}:
        source.opened(number)
    drop_cache(folder)
    size, started = 0, time.monotonic()
    for step, indices in enumerate(wanted):
        for ahead in wanted[step : step + AHEAD + 1]:
            source.prefetch(ahead)
        source.states(indices)
        size += sum(bytes_of(source.samples[i], source.identity) for i in indices)
    seconds = time.monotonic() - started
    return {
        "read_mib_s": round(size / 2**20 / seconds, 1),
        "read_samples_s": round(batches * batch / seconds, 1),
        "read_bytes": size,
    }


def plain(folder: Path, size: int) -> float:
    """MiB/s of plain reads of ``size`` bytes of the shards."""
    drop_cache(folder)

    def pieces() -> Iterator[tuple[Path, int]]:
        left = size
        for path in sorted((folder / SHARDS).iterdir()):
            for at in range(0, min(path.stat().st_size, left), PIECE):
                yield path, at
            left -= path.stat().st_size
            if left <= 0:
                return

    def one(piece: tuple[Path, int]) -> int:
        with piece[0].open("rb", buffering=0) as file:
            return len(os.pread(file.fileno(), PIECE, piece[1]))

    started = time.monotonic()
    with ThreadPoolExecutor(THREADS) as pool:
        total = sum(pool.map(one, pieces()))
    return round(total / 2**20 / (time.monotonic() - started), 1)


def trained(args: argparse.Namespace) -> dict[str, float]:
    """How long a training on the store waits for it."""
    drop_cache(args.folder)
    places = {"target": args.target, "draft": args.draft, "store": args.folder}
    quoted = {name: json.dumps(str(path.resolve())) for name, path in places.items()}
    with tempfile.TemporaryDirectory() as scratch:
        config, work = Path(scratch) / "train.toml", Path(scratch) / "work"
        config.write_text(TRAINING.format(**quoted, steps=args.steps, batch=args.batch))
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
        command += [str(args.processes), "-m", "sglang_hyperdflash.cli", "train", "--device", "cpu"]
        command += ["--threads", "1", "--config", str(config), "--work", str(work)]
        subprocess.run(command, check=True, stdout=sys.stderr)
        record = json.loads((work / "stage-1" / LOG).read_text().splitlines()[-1])
    answer = args.tokens - args.tokens // 2
    return {
        "data_wait": record["data_wait"],
        "trained_samples_s": round(record["tokens_s"] / answer, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="where the store is made")
    for name, value in (("shards", 100), ("samples", 25), ("tokens", 1000), ("paths", 1)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--width", type=int, default=1)
    parser.add_argument("--states-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--target", type=Path, help="take its --paths and --width")
    parser.add_argument("--draft", type=Path, help="drafter of the target, to be trained")
    parser.add_argument("--steps", type=int, default=200, help="of that training")
    parser.add_argument("--processes", type=int, default=2, help="of that training")
    parser.add_argument("--batches", type=int, default=50)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--only-open", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.only_open:
        print(json.dumps(opened(args.folder)))
        return
    make(args)
    # A process of its own: this one has the memory of the shards that it made.
    command = [sys.executable, __file__, "--folder", str(args.folder), "--only-open"]
    found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    found |= read(args.folder, args.batches, args.batch)
    found["disk_mib_s"] = plain(args.folder, found["read_bytes"])
    if args.draft is not None:
        found |= trained(args)
    print(json.dumps(found | {"provenance": provenance()}))


if __name__ == "__main__":
    main()

"""What to do with requests whose context is partly cached: ``HYPERDFLASH_RECORD_CONTEXT``.

    python examples/tiny_deepseek_v4/recording_context.py --out build/recording_context

Servers record the same conversations of several turns with different shares that must be computed.
Drafters are trained for as many steps on what each recorded, and judged on whole conversations.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

from eval.client import Sampling, converse_all
from exchanges import FAMILIES
from sglang_hyperdflash.cli import main as hyperdflash
from sglang_hyperdflash.serving.record.settings import RECORD
from sglang_hyperdflash.serving.record.writer import SHARD_SECONDS
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import (
    Server,
    comparable_arguments,
    hyperdflash_arguments,
)
from sglang_hyperdflash.training.store.reader import StoreReader
from study import SHAPE

HERE = Path(__file__).resolve().parent
TARGET, DRAFTER = HERE / "target", HERE / "drafter"
SHARES = (0.0, 0.5, 1.0)
TURNS, CONCURRENCY, GREEDY = 4, 8, Sampling(0.0, 128)
SCHEDULE = """
target = "{target}"
draft = "{out}/draft"
out = "{out}/trained"
features = "captured"
max_length = 2048
[held_out]
whole = "{held_out}"
[[stage]]
data = ["{store}"]
steps = {steps}
lr = 2e-3
batch = 16
anchors = 8
every = {steps}
warmup_steps = 20
seed = {seed}
"""


def conversations(count: int, seed: int) -> list[list[str]]:
    """Problems of any family, one after the other in a conversation."""
    rng, kinds = Random(seed), list(FAMILIES.values())
    drawn = (rng.choice(kinds).draw(rng, held_out=True) for _ in range(count * TURNS))
    asked = [exchange.messages[0]["content"] for exchange in drawn]
    return [asked[i : i + TURNS] for i in range(0, len(asked), TURNS)]


def record(out: Path, name: str, share: float, turns: list[list[str]], *more: str) -> Path:
    """The store of a server that answered some conversations."""
    store = out / name
    environment = {RECORD: str(store), f"{RECORD}_SHARE": "1", f"{RECORD}_CONTEXT": str(share)}
    arguments = (*comparable_arguments(), *hyperdflash_arguments(DRAFTER), *more)
    with Server(TARGET, *arguments, log=out / f"{name}.log", environment=environment) as server:
        server.wait()
        converse_all(server.url, turns, GREEDY, CONCURRENCY)
        time.sleep(2 * SHARD_SECONDS)
    return store


def trained(out: Path, store: Path, held_out: Path, steps: int, seed: int) -> float:
    """Simulated accept length of a drafter that was trained on a store."""
    out.mkdir(parents=True, exist_ok=True)
    init = ["init", "--target", str(TARGET), "--out", str(out / "draft"), "--seed", str(seed)]
    places = {"target": TARGET, "out": out, "held_out": held_out, "store": store}
    config = out / "train.toml"
    config.write_text(SCHEDULE.format(steps=steps, seed=seed, **places))
    train = ["train", "--config", str(config), "--work", str(out / "work"), "--threads", "2"]
    for command in ([*init, *SHAPE], train):
        if hyperdflash(command):
            raise SystemExit(2)
    lines = (out / "work" / "stage-1" / "training_log.jsonl").read_text().splitlines()
    return json.loads(lines[-1])["tau"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    add = parser.add_argument
    add("--out", type=Path, required=True, help="new folder for everything that this makes")
    add("--conversations", type=int, default=250, help="of four turns each")
    add("--steps", type=int, default=400, help="of every training")
    add("--seeds", type=int, default=2, help="trainings of each store")
    args = parser.parse_args()
    out = args.out.resolve()
    apart = ("--disable-radix-cache",)  # every row is computed
    held_out = record(out, "held out", 1.0, conversations(64, 1), *apart)
    turns, found = conversations(args.conversations, 0), {}
    for share in SHARES:
        store = record(out, f"context {share}", share, turns)
        samples = StoreReader(store).samples
        row: dict[str, Any] = {"requests": len(samples)}
        row["answer_tokens"] = sum(end - start for s in samples for start, end in s.spans)
        row["tokens"] = sum(len(sample.tokens) for sample in samples)
        place = out / f"trained {share}"
        row["tau"] = [
            trained(place / str(seed), store, held_out, args.steps, seed)
            for seed in range(args.seeds if samples else 0)
        ]
        found[str(share)] = row
        print(f"context {share}: {row}", flush=True)
    asked = {"requests": args.conversations * TURNS}
    result = {"provenance": provenance(), "asked": asked, "by_context": found}
    write_json(out / "result.json", result, indent=1)
    return 0


if __name__ == "__main__":
    sys.exit(main())

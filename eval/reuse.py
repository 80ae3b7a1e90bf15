"""``python -m eval.reuse``: cached tokens and time to first token of conversations.

The target is the tiny one, the client SGLang's own; users share system prompts. A server runs four
requests at once: one user never queues, and of sixteen twelve do, so that a conversation's K/V must
outlast the others' turns in a pool that has no room for all. A drafter's K/V take memory, so there
are two servers with HYPERDFLASH: one has as many slots as the baseline, the other as many bytes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

from eval.errors import EvalError
from eval.methods import BASELINE, Method, resolve
from eval.options import EXAMPLE
from eval.runner import Plan, Servers, with_noise_floor
from eval.serving import run_client
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import comparable_arguments

TARGET, DRAFTER = EXAMPLE / "target", EXAMPLE / "drafter"
SLOTS, RUNNING, USERS, TURNS = 4096, 4, (1, 16), 4
TRAFFIC = {
    "gsp-num-groups": 4,
    "gsp-prompts-per-group": 4,
    "gsp-num-turns": TURNS,
    "gsp-system-prompt-len": 128,
    "gsp-question-len": 48,
    "gsp-output-len": 16,
    "seed": 0,
}
SAME_BYTES = "hyperdflash, as many bytes"
NUMBERS = ("hit_rate", "first_turn_ms", "later_turns_ms")


def slot_bytes(folder: Path) -> int:
    """Bytes of a token's K and V in fp32, by the ``config.json`` of a target or drafter."""
    c = json.loads((folder / "config.json").read_bytes())
    return 2 * c["num_hidden_layers"] * c["num_key_value_heads"] * c["head_dim"] * 4


def methods() -> tuple[Method, ...]:
    """The baseline, HYPERDFLASH with as many slots, with as many bytes, the baseline again."""
    drafts = {"hyperdflash_draft": DRAFTER}
    plain, hyper = resolve([BASELINE, "hyperdflash-adaptive"], drafts, {})
    target, draft = slot_bytes(TARGET), slot_bytes(DRAFTER)
    slots = ("--max-total-tokens", str(SLOTS * target // (target + draft)))
    fewer = replace(hyper, name=SAME_BYTES, arguments=(*hyper.arguments, *slots))
    return with_noise_floor((plain, hyper, fewer))


def numbers_of(found: dict[str, Any]) -> dict[str, float]:
    """One line of the client, which has every turn of every user in order.

    Raises:
        EvalError: a turn failed.
    """
    if failed := [error for error in found["errors"] if error]:
        raise EvalError(f"{len(failed)} turns failed, the first with: {failed[0][:300]}")
    first = [ttft for i, ttft in enumerate(found["ttfts"]) if i % TURNS == 0]
    later = [ttft for i, ttft in enumerate(found["ttfts"]) if i % TURNS]
    rate = sum(found["cached_tokens"]) / sum(found["input_lens"])
    return dict(zip(NUMBERS, (rate, 1000 * median(first), 1000 * median(later)), strict=True))


def ask(url: str, users: int, work: Path) -> dict[str, float]:
    """All conversations, ``users`` at a time, from an empty cache."""
    result = work / "client.jsonl"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang-oai-chat"]
    command += ["--base-url", url, "--model", str(TARGET), "--max-concurrency", str(users)]
    command += ["--dataset-name", "generated-shared-prefix", "--flush-cache", "--cache-report"]
    command += ["--output-details", "--output-file", str(result), "--disable-tqdm"]
    for name, value in TRAFFIC.items():
        command += [f"--{name}", str(value)]
    run_client(command, work / "client.log")
    return numbers_of(json.loads(result.read_text()))


def measure(rounds: int, work: Path) -> list[dict[str, Any]]:
    """Every method under every load, in turn; medians, least and most of the rounds."""
    arguments = (*comparable_arguments(SLOTS), "--max-running-requests", str(RUNNING))
    plan = Plan(str(TARGET), methods(), {}, (), rounds, 32, work, arguments)
    found: dict[tuple[int, str], list[dict[str, float]]] = {}
    with Servers(plan) as servers:
        for turn in range(rounds):
            first = turn % len(plan.methods)
            for users in USERS:
                for method in (*plan.methods[first:], *plan.methods[:first]):
                    print(f"round {turn + 1}, users {users}, {method.name}", flush=True)
                    one = ask(servers.url(method), users, work)
                    found.setdefault((users, method.name), []).append(one)
    order = [(users, method.name) for users in USERS for method in plan.methods]
    return [row_of(users, name, found[users, name]) for users, name in order]


def row_of(users: int, method: str, rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """``[median, least, most]`` of each number."""
    columns = {name: [one[name] for one in rounds] for name in NUMBERS}
    spread = {name: [median(x), min(x), max(x)] for name, x in columns.items()}
    return {"users": users, "method": method, **spread}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    lines = ["| users | method | cached | first turn, ms | later turns, ms |", "|---" * 5 + "|"]
    for row in rows:
        rate, *times = (row[name] for name in NUMBERS)
        shown = ["{:.1%} ({:.1%} to {:.1%})".format(*rate)]
        shown += ["{:.1f} ({:.1f} to {:.1f})".format(*each) for each in times]
        lines.append(f"| {row['users']} | {row['method']} | {' | '.join(shown)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.reuse", description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder for logs")
    parser.add_argument("--out", type=Path, required=True, metavar="F", help="JSON file to write")
    parser.add_argument("--rounds", type=int, default=3, help="interleaved rounds")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rows = measure(args.rounds, args.work)
    fixed = {"slots": SLOTS, "running": RUNNING, "rounds": args.rounds, "traffic": TRAFFIC}
    fixed["slot_bytes"] = {"target": slot_bytes(TARGET), "drafter": slot_bytes(DRAFTER)}
    write_json(args.out, {"provenance": provenance(), **fixed, "rows": rows}, indent=1)
    print(table(rows))


if __name__ == "__main__":
    main()

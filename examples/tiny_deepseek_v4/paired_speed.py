"""Speed at one request at a time, every prompt asked of all servers one right after another.

    python examples/tiny_deepseek_v4/paired_speed.py --work build/drafter_study \
        --prompts build/held_out --out eval/results/paired_speed

No speculation (twice: the noise floor) and drafters of the same seed that ``drafter_study.py``
trained, each against the first of them. What slows a shared machine down for seconds slows them all
alike. Seeds that are measured already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import requests
from drafter_study import SETTINGS, drafter_of, read_prompts, was_served
from transformers import AutoTokenizer

from sglang_hyperdflash.serving.width_settings import FULL, WIDTH
from sglang_hyperdflash.tools.atomic import write_json, write_text
from sglang_hyperdflash.tools.checksum import bytes_hash
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import (
    Server,
    comparable_arguments,
    hyperdflash_arguments,
)

HERE = Path(__file__).resolve().parent
NONE, AGAIN = "no speculation", "the same again"
DRAWS = 2000
# Temperature -> kind of text -> of each prompt method -> [tokens, seconds, those behind the first].
Answers = dict[str, dict[str, list[dict[str, list[float]]]]]


def timed(server: Server, prompt: list[int], sampling: dict[str, Any]) -> list[float]:
    """Tokens and seconds of one streamed request, and its seconds behind the first token."""
    payload = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    started, first, last = time.monotonic(), None, {}
    with requests.post(f"{server.url}/generate", json=payload, stream=True, timeout=600) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith(b"data: {"):
                first = first or time.monotonic()
                last = json.loads(line[len(b"data: ") :])
    ended = time.monotonic()
    return [last["meta_info"]["completion_tokens"], ended - started, ended - (first or ended)]


def measure(seed: int, prompts: dict[str, list[list[int]]], args: argparse.Namespace) -> Answers:
    """Every prompt at each temperature; the order of the servers is shuffled for each."""
    order = random.Random(seed)
    with ExitStack() as stack:
        servers = {}
        for name in (NONE, *args.variants):
            drafter = None if name == NONE else drafter_of(name, seed, args.work)
            if name != NONE and drafter is None:
                raise SystemExit(f"{name}, seed {seed}: not trained in {args.work} yet.")
            more = () if drafter is None else hyperdflash_arguments(drafter)
            server = Server(
                args.target,
                *(*comparable_arguments(), "--disable-radix-cache", *more),
                log=args.work / "paired_speed.log",
                environment={WIDTH: FULL},
            )
            servers[name] = stack.enter_context(server).wait()
        servers[AGAIN] = servers[NONE]
        for name in servers:  # the first answers of a server are its slowest
            timed(servers[name], prompts[next(iter(prompts))][0], {"max_new_tokens": 64})
        found: Answers = {t: {kind: [] for kind in prompts} for t in args.temperatures}
        for t in args.temperatures:
            sampling = SETTINGS[t] | {"max_new_tokens": args.max_new_tokens}
            for kind, of_kind in prompts.items():
                for prompt in of_kind:
                    row = {}
                    for name in order.sample(list(servers), len(servers)):
                        row[name] = timed(servers[name], prompt, sampling)
                    found[t][kind].append(row)
    return found


def ratios(seeds: list[Answers], temperature: str, ours: str, theirs: str) -> dict[str, Any]:
    """Tokens a second of ``ours`` over ``theirs``: of all answers, of the kinds alike, of decoding.

    Decoding is what follows an answer's first token. All are means over seeds, with a 95 % interval
    over prompts drawn with replacement inside each kind, alike for every seed and method.
    """
    # Of each kind [seeds, methods, prompts, 4]: tokens, seconds, those of decoding, its tokens.
    tables = [
        np.array(
            [
                [[[*r[m], r[m][0] - 1] for r in s[temperature][kind]] for m in (ours, theirs)]
                for s in seeds
            ]
        )
        for kind in seeds[0][temperature]
    ]

    def of(sums: list[np.ndarray]) -> np.ndarray:
        """``[seeds, 3]`` of sums ``[seeds, methods, 4]``: all, the kinds alike, decoding."""
        whole = np.sum(sums, 0)
        rates = [s[..., 0] / s[..., 1] for s in (whole, *sums)]
        rates.append(whole[..., 3] / whole[..., 2])
        each = [rate[:, 0] / rate[:, 1] for rate in rates]
        return np.stack([each[0], np.mean(each[1:-1], 0), each[-1]], -1)

    draw = np.random.default_rng(0)
    drawn = [
        of([t[:, :, draw.integers(t.shape[2], size=t.shape[2])].sum(2) for t in tables]).mean(0)
        for _ in range(DRAWS)
    ]
    low, high = np.percentile(drawn, (2.5, 97.5), axis=0)
    each = of([t.sum(2) for t in tables])
    return {
        name: {
            "mean": float(each[:, i].mean()),
            "interval": [float(low[i]), float(high[i])],
            "seeds": each[:, i].tolist(),
        }
        for i, name in enumerate(("all", "kinds", "decoding"))
    }


def report(found: dict[str, Answers], args: argparse.Namespace) -> list[str]:
    """Markdown: a row for each ratio and temperature."""
    seeds = list(found.values())
    kinds = seeds[0][args.temperatures[0]]
    first, *others = args.variants
    pairs = [(name, NONE) for name in args.variants]
    pairs += [*((name, first) for name in others), (AGAIN, NONE)]
    count = sum(map(len, kinds.values()))
    lines = [
        "# Speed at one request at a time, prompts interleaved",
        "",
        f"{len(seeds)} seeds of each drafter, {count} prompts of {len(kinds)} kinds of text, at "
        f"most {args.max_new_tokens} tokens. Tokens a second of whole requests, prefill included; "
        "every prompt was asked of all servers one right after another, in an order of its own. "
        "No prompt is in a prefix cache. Means over seeds, in brackets a 95 % interval over "
        "prompts and each seed's own. *Again* is the same server asked twice; "
        "decoding is what follows an answer's first token.",
        "",
        "| temperature | | over all answers | mean of the kinds | decoding, over all answers |",
        "|---|---|---|---|---|",
    ]

    def cell(one: dict[str, Any]) -> str:
        low, high = one["interval"]
        each = ", ".join(f"{value:.2f}" for value in one["seeds"])
        return f"{one['mean']:.3f}x ({low:.3f} to {high:.3f}; {each})"

    for t in args.temperatures:
        for ours, theirs in pairs:
            cells = " | ".join(map(cell, ratios(seeds, t, ours, theirs).values()))
            lines.append(f"| {t} | {ours} over {theirs} | {cells} |")
    lengths = {
        (t, m): mean(r[m][0] for s in seeds for rows in s[t].values() for r in rows)
        for t in args.temperatures
        for m in (NONE, *args.variants)
    }
    told = ", ".join(f"{m} at {t}: {tokens:.1f}" for (t, m), tokens in lengths.items())
    return [*lines, "", f"Tokens of an answer, in the mean: {told}.", ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=Path("build/drafter_study"))
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, default=Path("build/held_out"))
    parser.add_argument("--num-prompts", type=int, default=20, help="of each kind")
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--variants", nargs="+", default=["hyperdflash", "hyperdflash2"])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--temperatures", nargs="+", choices=SETTINGS, default=["0", "1"])
    args = parser.parse_args()
    prompts = read_prompts(
        args.prompts, AutoTokenizer.from_pretrained(args.target), args.num_prompts
    )
    path = args.out / "results.json"
    asked = [args.num_prompts, args.max_new_tokens, args.temperatures, args.variants]
    setting = {"asked": asked, "prompts": bytes_hash([json.dumps(prompts).encode()])}
    found = json.loads(path.read_text())["seeds"] if was_served(path, setting) else {}
    for seed in args.seeds:
        if str(seed) not in found:
            found[str(seed)] = measure(seed, prompts, args)
            write_json(path, {"provenance": provenance(), "setting": setting, "seeds": found})
            write_text(args.out / "report.md", "\n".join(report(found, args)))
    print((args.out / "report.md").read_text())


if __name__ == "__main__":
    main()

"""Speed at one request at a time, every prompt asked of all servers one right after another.

    python examples/tiny_deepseek_v4/paired_speed.py --work build/drafter_study \
        --prompts build/held_out --out eval/results/paired_speed

No speculation (two servers: the noise floor) and drafters of one seed that ``drafter_study.py``
trained, each against the first of them. What slows a shared machine down for seconds slows them all
alike. Seeds that are measured already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import time
from contextlib import ExitStack
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import requests
from drafter_study import SETTINGS, VARIANTS, drafter_of, read_prompts, was_served
from transformers import AutoTokenizer

from sglang_hyperdflash.serving.draft_temperature import ADAPTIVE
from sglang_hyperdflash.serving.draft_temperature import VARIABLE as DRAFT_TEMPERATURE
from sglang_hyperdflash.serving.width_settings import FULL, WIDTH
from sglang_hyperdflash.tools.atomic import write_json, write_text
from sglang_hyperdflash.tools.checksum import bytes_hash, file_hash
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
    """Every prompt at each temperature; each server comes first, second, ... equally often."""
    with ExitStack() as stack:
        servers = {}
        for name in (NONE, AGAIN, *args.variants):
            drafter = None if name in (NONE, AGAIN) else drafter_of(name, seed, args.work)
            more = () if drafter is None else hyperdflash_arguments(drafter)
            sharpness = VARIANTS[name].sharpness if drafter is not None else None
            server = Server(
                args.target,
                *(*comparable_arguments(), "--disable-radix-cache", *more),
                log=args.work / "paired_speed.log",
                environment={WIDTH: FULL, DRAFT_TEMPERATURE: sharpness or ADAPTIVE},
            )
            servers[name] = stack.enter_context(server).wait()
        found: Answers = {t: {kind: [] for kind in prompts} for t in args.temperatures}
        order = list(servers)
        for t in args.temperatures:
            sampling = SETTINGS[t] | {"max_new_tokens": args.max_new_tokens}
            for server in servers.values():  # its first answers are its slowest
                for of_kind in prompts.values():
                    timed(server, of_kind[-1], sampling)
            for kind, of_kind in prompts.items():
                for prompt in of_kind:
                    order.append(order.pop(0))
                    row = {name: timed(servers[name], prompt, sampling) for name in order}
                    found[t][kind].append(row)
    return found


def weights_of(seed: int, args: argparse.Namespace) -> dict[str, str]:
    """The SHA-256 of each variant's drafter."""
    found = {}
    for name in args.variants:
        drafter = drafter_of(name, seed, args.work)
        if drafter is None:
            raise SystemExit(f"{name}, seed {seed}: not trained in {args.work} yet.")
        found[name] = file_hash(drafter / "model.safetensors")
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
        f"most {args.max_new_tokens} tokens. Tokens a second of whole streamed requests, prefill "
        "included; every prompt was asked of all servers one right after another. No prompt is in "
        "a prefix cache. Means over seeds, in brackets a 95 % interval over prompts, the trainings "
        "as they are, and each seed's own. *Again* is a second server of the same; decoding is "
        "what follows an answer's first token.",
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
    parser.add_argument(
        "--variants", nargs="+", choices=VARIANTS, default=["hyperdflash", "hyperdflash2"]
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--temperatures", nargs="+", choices=SETTINGS, default=["0", "1"])
    args = parser.parse_args()
    prompts = read_prompts(
        args.prompts, AutoTokenizer.from_pretrained(args.target), args.num_prompts
    )
    path = args.out / "results.json"
    asked = [args.num_prompts, args.max_new_tokens, args.temperatures, args.variants]
    setting = {"asked": asked, "prompts": bytes_hash([json.dumps(prompts).encode()])}
    known = json.loads(path.read_text()) if was_served(path, setting) else {}
    found, weights = known.get("seeds", {}), known.get("weights", {})
    for seed in args.seeds:
        mine = weights_of(seed, args)
        if str(seed) in found and weights[str(seed)] != mine:
            raise SystemExit(f"{path}: seed {seed} was measured with other drafters. Move it away.")
        if str(seed) not in found:
            found[str(seed)], weights[str(seed)] = measure(seed, prompts, args), mine
            content = {"setting": setting, "weights": weights, "seeds": found}
            write_json(path, {"provenance": provenance(), **content})
    write_text(args.out / "report.md", "\n".join(report(found, args)))
    print((args.out / "report.md").read_text())


if __name__ == "__main__":
    main()

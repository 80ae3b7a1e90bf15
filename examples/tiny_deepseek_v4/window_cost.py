"""What a round costs at growing contexts, with a draft window and without.

    python examples/tiny_deepseek_v4/window_cost.py --out eval/results/window_cost

The tiny target and its drafter are told that they have many more positions than they were trained
for: the tokens are worthless, the work of a round is the one of that context. Random prompts, one
request at a time; medians of the last rounds of each.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
from pathlib import Path

from sglang_hyperdflash.serving.round_times import FLUSH_EVERY, ROUND_TIMES, summarise
from sglang_hyperdflash.serving.width_settings import FULL, WIDTH
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import Server, hyperdflash_arguments
from sglang_hyperdflash.training.drafter import with_window

HERE = Path(__file__).resolve().parent
NEW_TOKENS = 192
# Rounds are written FLUSH_EVERY at a time; the first lot may begin with the request before.
ROUNDS = FLUSH_EVERY


def stretch(folder: Path, **fields: int) -> None:
    """Let a checkpoint's configuration say otherwise."""
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def measure(args: argparse.Namespace, target: Path, window: int | None) -> list[dict]:
    """Round times of one window at every length; every prompt is new, so nothing is cached."""
    name = window or "all"
    draft = args.work / f"draft-{name}"
    shutil.rmtree(draft, ignore_errors=True)
    with_window(HERE / "drafter", draft, window)
    stretch(draft, max_position_embeddings=args.positions)
    times, last = args.work / f"rounds-{name}.jsonl", args.work / "last.jsonl"
    arguments = ("--dtype", "float32", "--max-total-tokens", str(args.positions))
    arguments += ("--max-running-requests", "1", "--chunked-prefill-size", "256")
    arguments += ("--mem-fraction-static", "0.2", "--disable-radix-cache")
    draw, found = random.Random(0), []
    with Server(
        target,
        *arguments,
        *hyperdflash_arguments(draft),
        log=args.work / f"{name}.log",
        threads=1,
        environment={WIDTH: FULL, ROUND_TIMES: str(times.resolve())},
    ).wait() as server:
        for length in args.lengths:
            times.unlink(missing_ok=True)
            prompt = [draw.randrange(5, 2000) for _ in range(length)]
            sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
            server.generate(input_ids=prompt, sampling_params=sampling, timeout=3600)
            lines = times.read_text().splitlines(keepends=True)
            if len(lines) < 2 * ROUNDS:
                raise SystemExit(f"{length} tokens: {len(lines)} rounds, too few to tell its own.")
            last.write_text("".join(lines[-ROUNDS:]))
            found.append({"window": window, "length": length, "round_ms": summarise(last, 1)})
            print(found[-1], flush=True)
    return found


def table(results: list[dict], lengths: list[int]) -> str:
    """The report as Markdown."""
    lines = [
        "# A round's time at growing contexts, tiny DeepSeek-V4",
        "",
        f"Milliseconds, medians of {ROUNDS} rounds, one request, fp32, one thread: drafting, and "
        "in brackets the target's pass. The window is the drafter's; the target always attends to "
        "everything.",
        "",
        f"| W | {' | '.join(f'{length:,}' for length in lengths)} |",
        "|---" * (len(lengths) + 1) + "|",
    ]
    for window in dict.fromkeys(r["window"] for r in results):
        cells = [r["round_ms"] for r in results if r["window"] == window]
        texts = [f"{cell['draft']:.1f} ({cell['target']:.0f})" for cell in cells]
        lines.append(f"| {window or 'all'} | {' | '.join(texts)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/window_cost"))
    parser.add_argument("--window", type=int, default=64)
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=[1024, 2048, 4096, 8192, 16384, 32768]
    )
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    args.positions = max(args.lengths) + 1024
    sizes = {"max_position_embeddings": args.positions, "sliding_window": args.positions}
    target = args.work / "target"
    shutil.rmtree(target, ignore_errors=True)
    shutil.copytree(HERE / "target", target)
    stretch(target, **sizes)
    results = [one for w in (None, args.window) for one in measure(args, target, w)]
    args.out.mkdir(parents=True, exist_ok=True)
    content = {"provenance": provenance(), "results": results}
    (args.out / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    (args.out / "report.md").write_text(table(results, args.lengths))
    print(table(results, args.lengths))


if __name__ == "__main__":
    main()

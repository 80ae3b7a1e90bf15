"""What a draft window costs in acceptance, and what it saves, at growing contexts.

    python examples/tiny_deepseek_v4/window_study.py --data-dir DATA --out eval/results/window

The committed drafter, told at serving time to look back W tokens only (it was trained without a
window, so this is the worst case). A prompt is held-out documents one after another, cut to length,
then one held-out question. One server at a time; a round's times come from a second pass.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

from transformers import AutoTokenizer

import continuations
import corpus
from sglang_hyperdflash.metrics import accept_length, add_histograms, counters
from sglang_hyperdflash.provenance import provenance
from sglang_hyperdflash.reference.pool_log import logged_pools
from sglang_hyperdflash.round_times import ROUND_TIMES, summarise
from sglang_hyperdflash.serving import Server, hyperdflash_arguments
from sglang_hyperdflash.training.drafter import with_window

HERE = Path(__file__).resolve().parent
SERVER = ("--dtype", "float32", "--max-total-tokens", "16384", "--mem-fraction-static", "0.2")
SERVER += ("--sleep-on-idle", "--max-running-requests", "4")
NEW_TOKENS = 96


def long_prompts(tokenizer, data_dir: Path, lengths: list[int], count: int) -> dict:
    """``{length: [prompt ids]}``, the same questions at every length, all kinds in turn."""
    split, prompts = corpus.load(data_dir), {length: [] for length in lengths}
    for kind in corpus.KINDS:
        own = continuations.prompts_of(tokenizer, split[kind]["held_out"])
        questions = own[:: max(1, len(own) // count)][:count]
        rest = [token for prompt in own[1::2] for token in prompt] * 20
        for i, question in enumerate(questions):
            for length in lengths:
                need = max(0, length - len(question))
                prompts[length].append(rest[31 * i : 31 * i + need] + question)
    return prompts


def ask(server: Server, prompts: list[list[int]]) -> list[dict]:
    """Greedy answers of one length, one request at a time."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return [server.generate(input_ids=ids, sampling_params=sampling) for ids in prompts]


def measure(args, window: int | None, prompts: dict, expected: dict) -> dict:
    """Tau, identity and round times of one window at every length."""
    folder = args.work / f"draft-{window or 'full'}"
    shutil.rmtree(folder, ignore_errors=True)
    with_window(args.drafter, folder, window)
    log = args.work / f"{window or 'full'}.log"
    found: dict = {"window": window, "lengths": {}}
    arguments = (*SERVER, *hyperdflash_arguments(folder))
    with Server(args.target, *arguments, log=log, threads=1).wait() as server:
        for length, ids in prompts.items():
            answers = ask(server, ids)
            same = [a["output_ids"] for a in answers] == expected[length]
            histogram = add_histograms(counters(a["meta_info"])[2] for a in answers)
            tau = accept_length(sum(i * n for i, n in enumerate(histogram)), sum(histogram))
            found["lengths"][length] = {"tau": tau, "identical": same, "rounds": sum(histogram)}
        # The target's pool is allocated before the drafter's.
        found["draft_slots"] = logged_pools(log.read_text(errors="replace"))[-1].slots
    for length in (min(prompts), max(prompts)):
        times = args.work / "rounds.jsonl"
        times.unlink(missing_ok=True)
        environment = {ROUND_TIMES: str(times.resolve())}
        with Server(
            args.target, *arguments, log=log, threads=1, environment=environment
        ).wait() as server:
            ask(server, prompts[length][:6])
        found["lengths"][length]["round_ms"] = summarise(times, 1)
    return found


def table(results: list[dict], lengths: list[int]) -> str:
    """The report as Markdown."""
    heads = [f"tau at {length}" for length in lengths]
    ends = (lengths[0], lengths[-1])
    lines = [
        "# Draft windows on the tiny DeepSeek-V4",
        "",
        "The committed drafter, trained with the whole context, told when served to look back W "
        f"tokens only. Held-out questions behind other documents, {NEW_TOKENS} greedy tokens, "
        "fp32, one request at a time.",
        "",
        f"| W | {' | '.join(heads)} | draft slots | drafting at {ends[0]} / {ends[1]}, ms |",
        "|---" * (len(lengths) + 3) + "|",
    ]
    for result in results:
        taus = [f"{result['lengths'][n]['tau']:.2f}" for n in lengths]
        times = [result["lengths"][n]["round_ms"]["draft"] for n in ends]
        lines.append(
            f"| {result['window'] or 'all'} | {' | '.join(taus)} | {result['draft_slots']:,} | "
            f"{times[0]:.1f} / {times[1]:.1f} |"
        )
    same = all(entry["identical"] for r in results for entry in r["lengths"].values())
    lines += ["", f"Every answer equals target-only's: {'yes' if same else 'NO'}.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--drafter", type=Path, default=HERE / "drafter")
    parser.add_argument("--data-dir", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("build/window"))
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--windows", type=int, nargs="+", default=[256, 64, 16])
    parser.add_argument("--lengths", type=int, nargs="+", default=[200, 600, 1400])
    parser.add_argument("--prompts", type=int, default=4, help="of each kind")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = long_prompts(tokenizer, args.data_dir, sorted(args.lengths), args.prompts)
    log = args.work / "target.log"
    with Server(args.target, *SERVER, log=log, threads=1).wait() as server:
        expected = {n: [a["output_ids"] for a in ask(server, ids)] for n, ids in prompts.items()}
    results = [measure(args, window, prompts, expected) for window in (None, *args.windows)]
    args.out.mkdir(parents=True, exist_ok=True)
    content = {"provenance": provenance(), "results": results}
    (args.out / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    (args.out / "report.md").write_text(table(results, sorted(args.lengths)))
    print(table(results, sorted(args.lengths)))


if __name__ == "__main__":
    main()

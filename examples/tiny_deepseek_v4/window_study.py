"""What a draft window costs in acceptance, and what it saves, at growing contexts.

    python examples/tiny_deepseek_v4/window_study.py train
    python examples/tiny_deepseek_v4/window_study.py serve --out eval/results/window

``train`` goes on from the committed drafter with each window, and without one as the control, for
the same steps on the same samples (it resumes). ``serve`` measures these, and the committed drafter
told its window only when served. A prompt is held-out documents one after another, cut to length,
then one held-out question. One server at a time; a round's times come from a second pass.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from random import Random

import torch
from exchanges import KINDS
from transformers import AutoTokenizer

import continuations
import corpus
from sglang_hyperdflash.cpu.pool_log import logged_pools
from sglang_hyperdflash.serving.round_times import ROUND_TIMES, summarise
from sglang_hyperdflash.serving.width_settings import FULL, WIDTH
from sglang_hyperdflash.tools.acceptance import accept_length_of, add_histograms, counters
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import (
    Server,
    comparable_arguments,
    hyperdflash_arguments,
)
from sglang_hyperdflash.training.drafter import Drafter, with_window
from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.monitor import Monitor
from sglang_hyperdflash.training.recipe import Recipe
from sglang_hyperdflash.training.samples import FeatureCache
from sglang_hyperdflash.training.trainer import Trainer

HERE = Path(__file__).resolve().parent
SERVER = (*comparable_arguments(), "--max-running-requests", "4")
NEW_TOKENS = 96


def long_prompts(tokenizer, lengths: list[int], count: int) -> dict:
    """``{length: [prompt ids]}``, the same questions at every length, all kinds in turn."""
    split, prompts = corpus.load(), {length: [] for length in lengths}
    for kind in KINDS:
        own = continuations.prompts_of(tokenizer, split[kind]["held_out"])
        questions = continuations.spread(own, count)
        others = [prompt for prompt in own if prompt not in questions]
        Random(0).shuffle(others)
        rest = [token for prompt in others for token in prompt] * 20
        for i, question in enumerate(questions):
            for length in lengths:
                need = max(0, length - len(question))
                prompts[length].append(rest[31 * i : 31 * i + need] + question)
    return prompts


def ask(server: Server, prompts: list[list[int]]) -> list[dict]:
    """Greedy answers of one length, one request at a time."""
    sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
    return [server.generate(input_ids=ids, sampling_params=sampling) for ids in prompts]


def name_of(window: int | None) -> str:
    """A window as folders and the report call it."""
    return "all" if window is None else str(window)


def train(args: argparse.Namespace) -> None:
    """Go on from the committed drafter with every window; what is finished is not done again."""
    torch.set_num_threads(args.threads)
    target = LocalTarget(args.target)
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    samples, unseen = continuations.load(target, tokenizer, args.samples, args.per_kind)
    cache = FeatureCache(target, samples)
    held_out = {kind: FeatureCache(target, part) for kind, part in unseen.items()}
    recipe = Recipe(steps=args.steps, every=args.steps // 3, lr=args.lr)
    for window in (None, *args.windows):
        folder = args.work / f"train-{name_of(window)}"
        if not (folder / "start").is_dir():
            with_window(args.drafter, folder / "start", window)
        drafter = Drafter.load(folder / "start")
        trainer = Trainer(drafter, target, cache, held_out, recipe, folder)
        if trainer.progress() < 1.0:
            with Monitor(trainer, f"window {name_of(window)}") as monitor:
                trainer.run(folder / "drafter", monitor)


def measure(args, drafter: Path, trained: bool, window: int | None, prompts, expected) -> dict:
    """Tau, identity and round times of one drafter and window at every length."""
    folder = args.work / f"draft-{name_of(window)}-{'trained' if trained else 'told'}"
    shutil.rmtree(folder, ignore_errors=True)
    with_window(drafter, folder, window)
    log = args.work / f"{folder.name}.log"
    found: dict = {"window": window, "trained": trained, "lengths": {}}
    arguments = (*SERVER, *hyperdflash_arguments(folder))
    whole = {WIDTH: FULL}
    with Server(args.target, *arguments, log=log, threads=1, environment=whole).wait() as server:
        for length, ids in prompts.items():
            answers = ask(server, ids)
            same = [a["output_ids"] for a in answers] == expected[length]
            histogram = add_histograms(counters(a["meta_info"])[2] for a in answers)
            tau = accept_length_of(histogram)
            found["lengths"][length] = {"tau": tau, "identical": same, "rounds": sum(histogram)}
        # The target's pool is allocated before the drafter's.
        found["draft_slots"] = logged_pools(log.read_text(errors="replace"))[-1].slots
    for length in (min(prompts), max(prompts)):
        times = args.work / "rounds.jsonl"
        times.unlink(missing_ok=True)
        environment = {**whole, ROUND_TIMES: str(times.resolve())}
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
        "tokens only; and the same drafter after further training with that window (where W is "
        "all: the control). Held-out questions behind other documents, "
        f"{NEW_TOKENS} greedy tokens, fp32, one request at a time.",
        "",
        f"| W | trained with it | {' | '.join(heads)} | draft slots "
        f"| drafting at {ends[0]} / {ends[1]}, ms |",
        "|---" * (len(lengths) + 4) + "|",
    ]
    for result in results:
        taus = [f"{result['lengths'][n]['tau']:.2f}" for n in lengths]
        times = [result["lengths"][n]["round_ms"]["draft"] for n in ends]
        lines.append(
            f"| {name_of(result['window'])} | {'yes' if result['trained'] else 'no'} "
            f"| {' | '.join(taus)} | {result['draft_slots']:,} "
            f"| {times[0]:.1f} / {times[1]:.1f} |"
        )
    same = all(entry["identical"] for r in results for entry in r["lengths"].values())
    lines += ["", f"Every answer equals target-only's: {'yes' if same else 'NO'}.", ""]
    return "\n".join(lines)


def serve(args: argparse.Namespace) -> None:
    """Serve target-only, then every drafter and window, and write the report."""
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    lengths = sorted(args.lengths)
    prompts = long_prompts(tokenizer, lengths, args.prompts)
    log = args.work / "target.log"
    with Server(args.target, *SERVER, log=log, threads=1).wait() as server:
        expected = {n: [a["output_ids"] for a in ask(server, ids)] for n, ids in prompts.items()}
    results = []
    for window in (None, *args.windows):
        trained = args.work / f"train-{name_of(window)}" / "drafter"
        for drafter in (args.drafter, trained):
            results.append(measure(args, drafter, drafter is trained, window, prompts, expected))
    args.out.mkdir(parents=True, exist_ok=True)
    content = {"provenance": provenance(), "results": results}
    (args.out / "results.json").write_text(json.dumps(content, indent=1) + "\n")
    (args.out / "report.md").write_text(table(results, lengths))
    print(table(results, lengths))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("command", choices=("train", "serve"))
    parser.add_argument("--target", type=Path, default=HERE / "target")
    parser.add_argument("--drafter", type=Path, default=HERE / "drafter")
    parser.add_argument("--work", type=Path, default=Path("build/window"))
    parser.add_argument("--windows", type=int, nargs="+", default=[64, 16])
    training = parser.add_argument_group("train")
    training.add_argument("--samples", type=Path, default=Path("build/tiny_drafter"))
    training.add_argument("--per-kind", type=int, default=2000)
    training.add_argument("--steps", type=int, default=600)
    training.add_argument("--lr", type=float, default=5e-4)
    training.add_argument("--threads", type=int, default=2)
    serving = parser.add_argument_group("serve")
    serving.add_argument("--out", type=Path, default=Path("build/window/report"))
    serving.add_argument("--lengths", type=int, nargs="+", default=[200, 600, 1400])
    serving.add_argument("--prompts", type=int, default=4, help="of each kind")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    {"train": train, "serve": serve}[args.command](args)


if __name__ == "__main__":
    main()

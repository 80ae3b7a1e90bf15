"""Which choice pays: drafters of the tiny target, or another, that differ in one choice each.

    python examples/tiny_deepseek_v4/own_answers.py --out build/own
    python examples/tiny_deepseek_v4/exchange_prompts.py held-out --out build/held_out
    python examples/tiny_deepseek_v4/drafter_study.py train --part 1/2
    python examples/tiny_deepseek_v4/drafter_study.py train --part 2/2
    python examples/tiny_deepseek_v4/drafter_study.py serve
    python examples/tiny_deepseek_v4/drafter_study.py report --out eval/results/drafters

The paper's drafter, HyperDFlash-2, stand-ins of rivals, the depth of captured layers, and the
parts of each. ``train`` makes every variant with every seed through ``hyperdflash init`` and
``hyperdflash train`` from the files of ``drafters``. ``serve`` measures tau of each on held-out
prompts at three temperatures, and that greedy answers are the baseline's. All resume: what is
finished is not done again.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from drafter_report import write_report
from sglang_hyperdflash.cli import main as hyperdflash
from sglang_hyperdflash.serving.draft_temperature import ADAPTIVE
from sglang_hyperdflash.serving.draft_temperature import VARIABLE as DRAFT_TEMPERATURE
from sglang_hyperdflash.serving.width_settings import FULL, WIDTH
from sglang_hyperdflash.tools.acceptance import accept_length_of, add_histograms, counters
from sglang_hyperdflash.tools.atomic import write_json, write_text
from sglang_hyperdflash.tools.checksum import bytes_hash, file_hash
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import (
    Server,
    comparable_arguments,
    hyperdflash_arguments,
)

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

HERE = Path(__file__).resolve().parent
RECIPES = HERE / "drafters"
SETTINGS = {
    "0": {"temperature": 0.0},
    "0.6": {"temperature": 0.6, "top_p": 0.95},
    "1": {"temperature": 1.0},
}
HEAD = ("--dependency-rank", "128")
ALL = "the target's vocabulary"
NO_HEAD = ("--dependency-rank", "0")


@dataclass(frozen=True)
class Variant:
    """A training file of ``drafters`` and what differs from it.

    Attributes:
        init: options of ``hyperdflash init``. of: serves that variant's drafter, with another K
            (``top_k``) or with drafts of another sharpness.
    """

    recipe: str
    init: tuple[str, ...] = HEAD
    objective: dict[str, Any] = field(default_factory=dict)
    stage: dict[str, Any] = field(default_factory=dict)
    of: str | None = None
    top_k: int | None = None
    sharpness: str | None = None


VARIANTS = {
    "hyperdflash2": Variant("hyperdflash2"),
    "hyperdflash": Variant("hyperdflash", NO_HEAD),
    "dspark": Variant("dspark", ("--layer-ids", "5", "6", "7", *HEAD, "--dependency-top-k", ALL)),
    "dflash2": Variant(
        "dflash2",
        (
            *("--layer-ids", "1", "3", "5", *HEAD),
            *("--dependency-form", "product", "--dependency-top-k", "16"),
        ),
    ),
    "dflash": Variant("dflash", ("--layer-ids", "1", "3", "5", *NO_HEAD)),  # what SGLang chooses
    # Drafted as SGLang's DFLASH drafts.
    "argmax drafts": Variant("hyperdflash", of="hyperdflash", sharpness="0"),
    # Acceptance against the depth of the captured layers.
    **{
        f"dflash {' '.join(depth)}": Variant("dflash", ("--layer-ids", *depth, *NO_HEAD))
        for depth in ("012", "246", "456", "567")
    },
    # One choice against hyperdflash each.
    "fc": Variant("hyperdflash", ("--reducer", "fc", *NO_HEAD)),
    "no KL": Variant("hyperdflash", NO_HEAD, {"alpha": 0.0}),
    # One choice against hyperdflash2 each.
    "acceptance": Variant("hyperdflash2", objective={"loss": "acceptance"}),
    "half acceptance": Variant("hyperdflash2", objective={"loss": "acceptance", "mix": 0.5}),
    "quarter acceptance": Variant("hyperdflash2", objective={"loss": "acceptance", "mix": 0.25}),
    "acceptance no head": Variant("hyperdflash2", NO_HEAD, {"loss": "acceptance"}),
    "KL of all drafts": Variant("hyperdflash2", objective={"alpha": 1.0, "P": 6}),
    "selector": Variant("hyperdflash2", objective={"loss": "selector"}),
    "product": Variant("hyperdflash2", (*HEAD, "--dependency-form", "product")),
    "product selector": Variant(
        "hyperdflash2", (*HEAD, "--dependency-form", "product"), {"loss": "selector"}
    ),
    "no CE of candidates": Variant("hyperdflash2", objective={"candidates": 0.0}),
    "head at the drafter's rate": Variant("hyperdflash2", stage={"dependency_lr": 1.0}),
    "fast head": Variant("hyperdflash2", stage={"dependency_lr": 3.0}),
    "no gate of the head": Variant("hyperdflash2", stage={"dependency_gate": False}),
    "causal": Variant("hyperdflash2", (*HEAD, "--causal")),
    "layers 1 3 5": Variant("hyperdflash2", ("--layer-ids", "1", "3", "5", *HEAD)),
    "late layers": Variant("hyperdflash2", ("--layer-ids", "5", "6", "7", *HEAD)),
    "rank 64": Variant("hyperdflash2", ("--dependency-rank", "64")),
    "K = 16": Variant("hyperdflash2", of="hyperdflash2", top_k=16),
    "K = 256": Variant("hyperdflash2", of="hyperdflash2", top_k=256),
    "t = 0": Variant("hyperdflash2", of="hyperdflash2", sharpness="0"),
    "t = 0.5": Variant("hyperdflash2", of="hyperdflash2", sharpness="0.5"),
    "t = 1": Variant("hyperdflash2", of="hyperdflash2", sharpness="1"),
    "block 5": Variant("hyperdflash2", (*HEAD, "--block-size", "5")),
    "block 9": Variant("hyperdflash2", (*HEAD, "--block-size", "9")),
}


def run_folder(work: Path, name: str, seed: int) -> Path:
    """Where a variant's run with a seed keeps everything."""
    words = name.replace("=", "").replace("+", "and").split()
    return work / "-".join(words) / f"seed-{seed}"


def toml(values: dict[str, Any]) -> str:
    """TOML of plain values, tables and lists of tables; JSON spells a value as TOML does."""

    def lines(table: dict[str, Any]) -> str:
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())

    plain = {k: v for k, v in values.items() if not isinstance(v, dict) and k != "stage"}
    tables = (f"\n[{k}]\n{lines(v)}" for k, v in values.items() if isinstance(v, dict))
    stages = (f"\n[[stage]]\n{lines(stage)}" for stage in values["stage"])
    return "".join([lines(plain), *tables, *stages])


def training_file(variant: Variant, seed: int, folder: Path, args: argparse.Namespace) -> Path:
    """The variant's recipe with this run's target, data, length and seed."""
    raw = tomllib.loads((RECIPES / f"{variant.recipe}.toml").read_text(encoding="utf-8"))
    held = {p.stem.removeprefix("held_out_"): p for p in sorted(args.answers.glob("held_out_*"))}
    raw |= {
        "target": str(args.target.resolve()),
        "draft": str(folder.resolve() / "draft"),
        "out": str(folder.resolve() / "drafter"),
        "held_out": {kind: str(path.resolve()) for kind, path in held.items()},
        "objective": raw.get("objective", {}) | variant.objective,
    }
    parts = (args.answers.resolve() / f"{part}.jsonl" for part in ("greedy", "sampled"))
    own = {"data": [str(path) for path in parts], "seed": seed}
    own |= {} if args.steps is None else {"steps": args.steps}
    own |= {} if args.lr is None else {"lr": args.lr}
    raw["stage"] = [stage | variant.stage | own for stage in raw["stage"]]
    path = folder / "train.toml"
    write_text(path, toml(raw))
    return path


def init_options(variant: Variant, target: Path) -> list[str]:
    """Options of ``hyperdflash init`` for a target."""
    vocabulary = json.loads((target / "config.json").read_text())["vocab_size"]
    return [str(vocabulary) if option == ALL else option for option in variant.init]


def answers_hash(folder: Path) -> str:
    """Of the training answers, so that one table holds drafters of the same alone."""
    return bytes_hash((folder / f"{part}.jsonl").read_bytes() for part in ("greedy", "sampled"))


def train(args: argparse.Namespace) -> None:
    """Train this part's share of variants and seeds."""
    part, parts = map(int, args.part.split("/"))
    data = {"steps": args.steps, "answers": answers_hash(args.answers)}
    names = [name for name in args.variants if VARIANTS[name].of is None]
    for name, seed in [(name, seed) for seed in args.seeds for name in names][part - 1 :: parts]:
        variant, folder = VARIANTS[name], run_folder(args.work, name, seed)
        made = folder / "trained.json"
        if made.is_file():
            if json.loads(made.read_text()).get("data") != data:
                raise SystemExit(f"{folder} was trained on other answers. Choose another --work.")
            continue
        folder.mkdir(parents=True, exist_ok=True)
        start = ["--target", str(args.target), "--out", str(folder / "draft"), "--seed", str(seed)]
        config = training_file(variant, seed, folder, args)
        work = ["--work", str(folder / "work"), "--states", str(args.work / "states")]
        work += ["--threads", str(args.threads)]
        for command in (
            ["init", *start, *init_options(variant, args.target)],
            ["train", "--config", str(config), *work],
        ):
            if hyperdflash(command):
                raise SystemExit(f"{name}, seed {seed}: hyperdflash {command[0]} failed.")
        log = (folder / "work" / "stage-1" / "training_log.jsonl").read_text().splitlines()
        write_json(made, {"last": json.loads(log[-1]), "data": data, "provenance": provenance()})


def drafter_of(name: str, seed: int, work: Path) -> Path | None:
    """A variant's trained drafter, a copy with another K where that is it; None before it is."""
    variant, folder = VARIANTS[name], run_folder(work, name, seed)
    if variant.of is None:
        return folder / "drafter" if (folder / "trained.json").is_file() else None
    source = drafter_of(variant.of, seed, work)
    if source is None:
        return None
    (folder / "drafter").mkdir(parents=True, exist_ok=True)
    raw = json.loads((source / "config.json").read_text())
    if variant.top_k is not None:
        raw["hyperdflash_config"]["dependency"]["top_k"] = variant.top_k
    write_json(folder / "drafter" / "config.json", raw, indent=2)
    shutil.copyfile(source / "model.safetensors", folder / "drafter" / "model.safetensors")
    return folder / "drafter"


def trained(name: str, seed: int, work: Path) -> dict[str, Any]:
    """The last line of a finished run's training log."""
    return json.loads((run_folder(work, name, seed) / "trained.json").read_text())["last"]


def read_prompts(folder: Path, tokenizer, count: int) -> dict[str, list[list[int]]]:
    """Prompts by kind of text, from a ``{"turns": [...]}`` file or a folder of them."""
    found = {}
    for path in sorted(folder.glob("*.jsonl") if folder.is_dir() else [folder]):
        turns = [json.loads(line)["turns"][0] for line in path.read_text().splitlines()[:count]]
        found[path.stem] = [
            tokenizer.apply_chat_template(
                [{"role": "user", "content": turn}],
                add_generation_prompt=True,
                return_dict=False,
            )
            for turn in turns
        ]
    return found


def ask(server: Server, prompts: list[list[int]], sampling: dict, concurrency: int) -> list[dict]:
    """Every prompt's answer."""

    def one(prompt: list[int]) -> dict:
        return server.generate(input_ids=prompt, sampling_params=sampling, return_logprob=True)

    with ThreadPoolExecutor(concurrency) as pool:
        return list(pool.map(one, prompts))


def nats(answers: list[dict]) -> float:
    """Mean surprise of the answers' tokens: at temperature 1 an estimate of the text's entropy."""
    values = [-x[0] for a in answers for x in a["meta_info"]["output_token_logprobs"]]
    return sum(values) / len(values)


def tau_of(answers: list[dict], repeats: int = 1) -> dict[str, Any]:
    """tau, the rounds by how many drafts each accepted, and of each prompt rounds and drafts.

    Args:
        answers: of every prompt, ``repeats`` times one after another; a prompt's are added up.
    """
    histograms = [counters(answer["meta_info"])[2] for answer in answers]
    count = len(answers) // repeats
    of_prompts = [add_histograms(histograms[prompt::count]) for prompt in range(count)]
    total = add_histograms(histograms)
    prompts = [[sum(h), sum(k * rounds for k, rounds in enumerate(h))] for h in of_prompts]
    return {"tau": accept_length_of(total), "histogram": total, "prompts": prompts}


def was_served(path: Path, setting: dict[str, Any]) -> bool:
    """Whether ``path`` holds results of ``setting``; refuses those of another."""
    if not path.is_file():
        return False
    found = json.loads(path.read_text()).get("setting", {})
    changed = [name for name in setting if found.get(name) != setting[name]]
    if changed:
        raise SystemExit(
            f"{path} was served with another {', '.join(changed)}. Move it away, or choose another "
            "--work."
        )
    return True


def serve(args: argparse.Namespace) -> None:
    """Serve target-only once and every trained drafter, one after another."""
    tokenizer = AutoTokenizer.from_pretrained(args.target)
    prompts = read_prompts(args.prompts, tokenizer, args.num_prompts)
    settings = {t: SETTINGS[t] | {"max_new_tokens": args.max_new_tokens} for t in SETTINGS}
    repeats = {t: args.repeats if s["temperature"] else 1 for t, s in settings.items()}
    log, path = args.work / "server.log", args.work / "target.json"

    def measure(server: Server) -> dict[str, dict[str, list[dict]]]:
        return {
            t: {k: ask(server, p * repeats[t], s, args.concurrency) for k, p in prompts.items()}
            for t, s in settings.items()
        }

    args.work.mkdir(parents=True, exist_ok=True)
    asked = {"sampling": settings, "prompts": bytes_hash([json.dumps(prompts).encode()])}
    if not was_served(path, asked):
        with Server(args.target, *comparable_arguments(), log=log).wait() as server:
            found = measure(server)
        greedy = {k: [a["output_ids"] for a in answers] for k, answers in found["0"].items()}
        entropy = {t: {k: nats(a) for k, a in kinds.items()} for t, kinds in found.items()}
        write_json(path, {"greedy": greedy, "nats": entropy, "setting": asked})
    expected = json.loads(path.read_text())["greedy"]
    for name in args.variants:
        for seed in args.seeds:
            folder, drafter = run_folder(args.work, name, seed), drafter_of(name, seed, args.work)
            if drafter is None:
                continue
            environment = {WIDTH: FULL, DRAFT_TEMPERATURE: VARIANTS[name].sharpness or ADAPTIVE}
            setting = asked | {"repeats": args.repeats, "environment": environment}
            setting["weights"] = file_hash(drafter / "model.safetensors")
            if was_served(folder / "served.json", setting):
                continue
            arguments = (*comparable_arguments(), *hyperdflash_arguments(drafter))
            with Server(args.target, *arguments, log=log, environment=environment).wait() as server:
                found = measure(server)
            taus = {
                t: {k: tau_of(a, repeats[t]) for k, a in kinds.items()}
                for t, kinds in found.items()
            }
            pairs = [
                (answer["output_ids"], tokens)
                for kind, answers in found["0"].items()
                for answer, tokens in zip(answers, expected[kind], strict=True)
            ]
            same = sum(a == b for a, b in pairs)
            record = {"served": taus, "identical": same, "answers": len(pairs), "setting": setting}
            record["trained"] = trained(VARIANTS[name].of or name, seed, args.work)
            write_json(folder / "served.json", record | {"provenance": provenance()})
            means = {t: sum(x["tau"] for x in k.values()) / len(k) for t, k in taus.items()}
            shown = ", ".join(f"T {t} tau {tau:.3f}" for t, tau in means.items())
            print(f"{name} seed {seed}: {shown}; {same} of {len(pairs)} answers are target-only's")


def report(args: argparse.Namespace) -> None:
    """Collect what was served into the report."""
    runs = {
        name: {
            int(folder.name[5:]): json.loads((folder / "served.json").read_text())
            for folder in sorted(run_folder(args.work, name, 0).parent.glob("seed-*"))
            if (folder / "served.json").is_file()
        }
        for name in VARIANTS
    }
    target = json.loads((args.work / "target.json").read_text())
    write_report({k: v for k, v in runs.items() if v}, target["nats"], args.out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for run in (train, serve, report):
        command = commands.add_parser(run.__name__, help=run.__doc__)
        command.add_argument("--work", type=Path, default=Path("build/drafter_study"))
        command.set_defaults(run=run)
        if run is report:
            command.add_argument("--out", type=Path, default=Path("eval/results/drafters"))
            continue
        command.add_argument("--target", type=Path, default=HERE / "target")
        command.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
        command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
        if run is serve:
            command.add_argument("--prompts", type=Path, default=Path("build/held_out"))
            command.add_argument("--num-prompts", type=int, default=20, help="of each kind")
            command.add_argument("--max-new-tokens", type=int, default=128)
            command.add_argument("--concurrency", type=int, default=8)
            command.add_argument("--repeats", type=int, default=1, help="of sampled answers")
            continue
        command.add_argument("--answers", type=Path, default=Path("build/own"))
        command.add_argument("--steps", type=int, help="default: the training file's")
        command.add_argument("--lr", type=float, help="default: the training file's")
        command.add_argument("--part", default="1/1", help="i/n: every n-th run from the i-th")
        command.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    main()

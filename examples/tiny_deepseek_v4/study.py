"""Train drafters of the tiny target that differ in one choice, serve them and compare.

From a checkout, with ``PYTHONPATH=.``:

    python examples/tiny_deepseek_v4/study.py serve --data-dir DATA/benchmarks --out build/accepted
    python examples/tiny_deepseek_v4/study.py speed --data-dir DATA/benchmarks --out build/speed

``serve`` measures the accept length at three temperatures, on held-out problems and on benchmarks,
and compares every greedy answer with the baseline's. ``speed`` measures tokens per second at one
request at a time. Both train the drafters that are missing. ``train`` only trains, so that
processes can share the work (``--part 1/2``); ``report`` renders a result again. All resume.
"""

from __future__ import annotations

import argparse
import json
import time
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import requests
from transformers import AutoTokenizer

import corpus
from eval import rivals
from exchange_prompts import BENCHMARK_SEED
from exchanges import KINDS, in_turn
from sglang_hyperdflash.cli import main as hyperdflash
from sglang_hyperdflash.serving.settings import COPY, DRAFT_TEMPERATURE, FULL, WIDTH
from sglang_hyperdflash.tools.acceptance import add_histograms, counters
from sglang_hyperdflash.tools.atomic import write_json, write_text
from sglang_hyperdflash.tools.checksum import bytes_hash, file_hash
from sglang_hyperdflash.tools.errors import HyperDFlashError
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import Server, comparable_arguments
from study_report import BASELINE, NOISE, render

TARGET = Path(__file__).resolve().parent / "target"
TRAINING_FILE = TARGET.parent / "drafter.toml"
SAMPLING = {
    "0": {"temperature": 0.0},
    "0.6": {"temperature": 0.6, "top_p": 0.95},
    "1": {"temperature": 1.0},
}
BENCHMARKS = ("gsm8k", "humaneval", "mt-bench")
PER_FAMILY, MAX_NEW, CONCURRENCY = 4, 64, 8
SHAPE = ("--layers", "3", "--heads", "4", "--kv-heads", "2", "--head-dim", "64")
SHAPE += ("--intermediate-size", "768", "--window", "0")
HEAD, NO_HEAD = ("--dependency-rank", "128"), ("--dependency-rank", "0")
LAYERS = "--layer-ids"


@dataclass(frozen=True)
class Variant:
    """What differs from HyperDFlash-2, ``drafter.toml``.

    Attributes:
        init: options of ``hyperdflash init``. objective, stage: fields of the training file.
        algorithm: of SGLang. of: the variant that it is, served with another draft temperature.
    """

    init: tuple[str, ...] = HEAD
    objective: Mapping[str, Any] = field(default_factory=dict)
    stage: Mapping[str, Any] = field(default_factory=dict)
    algorithm: str = "HYPERDFLASH"
    of: str | None = None
    draft_temperature: str = "0.5"


VARIANTS = {
    "hyperdflash": Variant(NO_HEAD),
    "hyperdflash2": Variant(),
    "dspark-style": Variant(
        (LAYERS, "5", "6", "7", *HEAD, "--dependency-top-k", "1363"),  # the whole vocabulary
        {"loss": "acceptance", "candidates": 0.0},
        {"dependency_gate": False},
    ),
    "dflash2-style": Variant(
        (LAYERS, "1", "3", "5", *HEAD, "--dependency-form", "product", "--dependency-top-k", "16"),
        {"loss": "selector"},
    ),
    # Of the layers that SGLang chooses.
    "dflash": Variant((LAYERS, "1", "3", "5", *NO_HEAD), algorithm="DFLASH"),
    "hyperdflash, argmax drafts": Variant(of="hyperdflash", draft_temperature="0"),
    "hyperdflash2, argmax drafts": Variant(of="hyperdflash2", draft_temperature="0"),
}


def toml(values: Mapping[str, Any]) -> str:
    """TOML of plain values, tables and lists of tables; JSON spells a value as TOML does."""

    def lines(table: Mapping[str, Any]) -> str:
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())

    plain = {k: v for k, v in values.items() if not isinstance(v, dict) and k != "stage"}
    tables = (f"\n[{k}]\n{lines(v)}" for k, v in values.items() if isinstance(v, dict))
    stages = (f"\n[[stage]]\n{lines(stage)}" for stage in values["stage"])
    return "".join([lines(plain), *tables, *stages])


def training_file(variant: Variant, folder: Path, answers: Path, **stage: Any) -> Path:
    """Write ``folder/train.toml``: the variant's training file with its data and stage fields."""
    raw = tomllib.loads(TRAINING_FILE.read_text(encoding="utf-8"))
    answers, folder = answers.resolve(), folder.resolve()
    held_out = {p.stem.removeprefix("held_out_"): str(p) for p in answers.glob("held_out_*")}
    raw |= {"target": str(TARGET), "draft": str(folder / "new"), "out": str(folder / "trained")}
    raw |= {"held_out": dict(sorted(held_out.items()))}
    raw["objective"] = raw["objective"] | variant.objective
    stage["data"] = [str(answers / f"{part}.jsonl") for part in ("greedy", "sampled")]
    raw["stage"] = [
        {k: v for k, v in (fields | variant.stage | stage).items() if v is not None}
        for fields in raw["stage"]
    ]
    write_text(folder / "train.toml", toml(raw))
    return folder / "train.toml"


def train_drafter(
    variant: Variant, folder: Path, answers: Path, seed: int, threads: int, **stage: Any
) -> Path:
    """Run ``hyperdflash init`` and ``train`` in a folder; return the trained drafter's folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config = training_file(variant, folder, answers, seed=seed, **stage)
    made = ["--target", str(TARGET), "--out", str(folder / "new"), "--seed", str(seed)]
    work = ["--work", str(folder / "work"), "--states", str(answers.parent / "states")]
    for command in (
        ["init", *made, *SHAPE, *variant.init],
        ["train", "--config", str(config), *work, "--threads", str(threads)],
    ):
        if hyperdflash(command):
            raise SystemExit(f"{folder}: hyperdflash {command[0]} failed.")
    if variant.algorithm == "DFLASH":  # the same tensors; SGLang's own class serves them
        path = folder / "trained" / "config.json"
        write_json(path, json.loads(path.read_text()) | {"architectures": ["DFlashDraftModel"]})
    return folder / "trained"


def write_answers(work: Path) -> Path:
    """The folder of the target's answers; asks a server for what is missing."""
    prompts, answers = work / "prompts", work / "answers"
    if (answers / "complete").is_file():
        return answers
    corpus.write(prompts)
    with server_of(BASELINE, None, work / "answers.log").wait() as server:
        for path in sorted(prompts.glob("*.jsonl")):
            kinds = {path.stem: "0"} if path.stem == "greedy" else {path.stem: "1"}
            if path.stem.startswith("held_out_"):
                kinds = {path.stem: "0", f"{path.stem}_sampled": "1"}
            for name, temperature in kinds.items():
                files = ["--input", str(path), "--output", str(answers / f"{name}.jsonl")]
                sampling = ["--temperature", temperature, "--top-p", "1", "--top-k", "-1"]
                asked = ["--server", server.url, "--target", str(TARGET), "--max-new-tokens", "128"]
                if hyperdflash(["regenerate", *asked, *files, *sampling]):
                    raise SystemExit(f"{answers}: hyperdflash regenerate failed.")
    write_text(answers / "complete", "")
    return answers


def drafter_of(name: str, seed: int, args: argparse.Namespace) -> Path:
    """The variant's trained drafter; trains it first where it is missing."""
    name = VARIANTS[name].of or name
    folder, answers = args.work / name / f"seed-{seed}", write_answers(args.work)
    parts = ((answers / f"{part}.jsonl").read_bytes() for part in ("greedy", "sampled"))
    record, expected = folder / "trained.json", {"steps": args.steps, "answers": bytes_hash(parts)}
    if not record.is_file():
        train_drafter(VARIANTS[name], folder, answers, seed, args.threads, steps=args.steps)
        write_json(record, expected)
    elif (found := json.loads(record.read_text())) != expected:
        raise SystemExit(f"{folder}: expected {expected}, found {found}. Choose another --work.")
    return folder / "trained"


def read_prompts(data_dir: Path | None, count: int) -> dict[str, list[list[int]]]:
    """At most ``count`` prompts of each set: held-out problems by kind, and benchmarks."""
    texts = {
        kind: [e.messages[0]["content"] for e in in_turn(BENCHMARK_SEED, PER_FAMILY, families)]
        for kind, families in KINDS.items()
    }
    for name in () if data_dir is None else BENCHMARKS:
        lines = (data_dir / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
        texts[name] = [json.loads(line)["turns"][0] for line in lines]
    tokenizer = AutoTokenizer.from_pretrained(TARGET)

    def encode(text: str) -> list[int]:
        turn = [{"role": "user", "content": text}]
        return tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False)

    return {name: [encode(text) for text in texts[name][:count]] for name in sorted(texts)}


def stored(path: Path, setting: dict[str, Any]) -> dict[str, Any]:
    """What a result file holds, if it exists; rejects one of another setting."""
    found = json.loads(path.read_text()) if path.is_file() else {"setting": setting, "seeds": {}}
    changed = [name for name in setting if found["setting"].get(name) != setting[name]]
    if changed:
        raise SystemExit(f"{path}: measured with other {', '.join(changed)}. Choose another --out.")
    return found


def save(path: Path, found: dict[str, Any]) -> None:
    """The result and its report."""
    write_json(path, found | {"provenance": provenance()})
    write_text(path.with_name("report.md"), render(found))


def server_of(name: str, drafter: Path | None, log: Path, *more: str) -> Server:
    """A server of a variant, or of the baseline: no drafter."""
    arguments, environment = [*comparable_arguments(), *more], {}
    if drafter is not None:
        arguments += ["--speculative-algorithm", VARIANTS[name].algorithm]
        arguments += ["--speculative-draft-model-path", str(drafter)]
        drafts = VARIANTS[name].draft_temperature
        environment = {WIDTH: FULL, COPY: "0", DRAFT_TEMPERATURE: drafts}
    environment |= rivals.environment(arguments)
    return Server(TARGET, *arguments, log=log, environment=environment)


def pending(
    found: dict[str, Any], seed: int, args: argparse.Namespace
) -> Iterator[tuple[str, Path]]:
    """Variants that are not measured yet, and their drafters; rejects a drafter that changed."""
    weights = found.setdefault("weights", {}).setdefault(str(seed), {})
    for name in args.variants:
        drafter = drafter_of(name, seed, args)
        digest = file_hash(drafter / "model.safetensors")
        if weights.setdefault(name, digest) != digest:
            raise SystemExit(
                f"{name}, seed {seed}: measured with other weights. Choose another --out."
            )
        if name not in found["seeds"].get(str(seed), {}):
            yield name, drafter


def counts_of(answers: list[dict], prompts: int) -> list[list[int]]:
    """Verification rounds and accepted drafts of each prompt, which is asked several times.

    Args:
        answers: of every prompt, then of every prompt again, and so on.
    """
    histograms = [counters(answer["meta_info"])[2] for answer in answers]
    every = [add_histograms(histograms[prompt::prompts]) for prompt in range(prompts)]
    return [[sum(h), sum(k * rounds for k, rounds in enumerate(h))] for h in every]


def nats(answers: list[dict]) -> float:
    """Minus the mean log probability of the answers' tokens."""
    values = [-x[0] for a in answers for x in a["meta_info"]["output_token_logprobs"]]
    return sum(values) / len(values)


def serve(args: argparse.Namespace) -> None:
    """Measure the accept length of every variant and seed."""
    prompts, log = read_prompts(args.data_dir, args.num_prompts), args.work / "server.log"
    sampling = {t: SAMPLING[t] | {"max_new_tokens": MAX_NEW} for t in SAMPLING}
    repeats = {t: args.repeats if s["temperature"] else 1 for t, s in sampling.items()}
    setting = {"sampling": sampling, "prompts": bytes_hash([json.dumps(prompts).encode()])}
    path = args.out / "results.json"
    found = stored(path, setting)

    def measure(server: Server) -> dict[str, dict[str, list[dict]]]:
        def ask(job: tuple[list[int], dict]) -> dict:
            return server.generate(input_ids=job[0], sampling_params=job[1], return_logprob=True)

        with ThreadPoolExecutor(CONCURRENCY) as pool:
            return {
                t: {
                    name: list(pool.map(ask, [(one, s) for one in some * repeats[t]]))
                    for name, some in prompts.items()
                }
                for t, s in sampling.items()
            }

    expected: list[list[int]] = []
    for seed, (name, drafter) in ((s, one) for s in args.seeds for one in pending(found, s, args)):
        if not expected:
            with server_of(BASELINE, None, log).wait() as server:
                answers = measure(server)
            found["nats"] = {t: {k: nats(a) for k, a in s.items()} for t, s in answers.items()}
            expected = [a["output_ids"] for some in answers["0"].values() for a in some]
        with server_of(name, drafter, log).wait() as server:
            answers = measure(server)
        greedy = [a["output_ids"] for some in answers["0"].values() for a in some]
        found["seeds"].setdefault(str(seed), {})[name] = {
            "identical": sum(a == b for a, b in zip(greedy, expected, strict=True)),
            "answers": len(greedy),
            "repeats": args.repeats,
            "steps": args.steps,
            "counts": {
                t: {k: counts_of(a, len(prompts[k])) for k, a in some.items()}
                for t, some in answers.items()
            },
        }
        save(path, found)
        print(f"{name}, seed {seed}: measured", flush=True)
    report(args)


def timed(server: Server, prompt: list[int], sampling: dict[str, Any]) -> list[float]:
    """Tokens and seconds of one streamed request, and its seconds after the first token."""
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


def speed(args: argparse.Namespace) -> None:
    """Measure tokens per second of one request at a time, all servers up.

    Each prompt is asked of all servers one right after another, and each server comes first, second
    and so on equally often: what slows a shared machine down for seconds slows them all alike. A
    second baseline server shows the noise.
    """
    prompts, log = read_prompts(args.data_dir, args.num_prompts), args.work / "speed.log"
    sampling = {t: SAMPLING[t] | {"max_new_tokens": MAX_NEW} for t in args.temperatures}
    setting = {"sampling": sampling, "prompts": bytes_hash([json.dumps(prompts).encode()])}
    setting["variants"] = args.variants
    path = args.out / "results.json"
    found = stored(path, setting)
    for seed in args.seeds:
        drafters = dict(pending(found, seed, args))
        if not drafters:
            continue
        with ExitStack() as stack:

            def start(name: str, drafter: Path | None) -> Server:
                server = server_of(name, drafter, log, "--disable-radix-cache")
                return stack.enter_context(server).wait()

            servers = {name: start(name, None) for name in (BASELINE, NOISE)}
            servers |= {name: start(name, drafter) for name, drafter in drafters.items()}
            found["seeds"][str(seed)] = interleaved(servers, prompts, sampling)
        save(path, found)
    report(args)


def interleaved(
    servers: dict[str, Server], prompts: dict[str, list[list[int]]], sampling: dict[str, dict]
) -> dict[str, dict[str, dict[str, list[list[float]]]]]:
    """``{server: {temperature: {set: [[tokens, seconds, seconds after the first], ...]}}}``."""
    found = {n: {t: {k: [] for k in prompts} for t in sampling} for n in servers}
    order = list(servers)
    for t, setting in sampling.items():
        for server in servers.values():  # its first answers are its slowest
            for some in prompts.values():
                timed(server, some[-1], setting)
        for name, some in prompts.items():
            for prompt in some:
                order.append(order.pop(0))
                for one in order:
                    found[one][t][name].append(timed(servers[one], prompt, setting))
    return found


def train(args: argparse.Namespace) -> None:
    """Train this part's share of variants and seeds."""
    part, parts = map(int, args.part.split("/"))
    names = [name for name in args.variants if VARIANTS[name].of is None]
    for name, seed in [(name, seed) for seed in args.seeds for name in names][part - 1 :: parts]:
        print(drafter_of(name, seed, args), flush=True)


def report(args: argparse.Namespace) -> None:
    """Render OUT/report.md from OUT/results.json."""
    write_text(args.out / "report.md", render(json.loads((args.out / "results.json").read_text())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for run in (train, serve, speed, report):
        command = commands.add_parser(run.__name__, help=run.__doc__.splitlines()[0])
        command.set_defaults(run=run)
        if run is not train:
            command.add_argument("--out", type=Path, required=True, help="folder of the result")
        if run is report:
            continue
        names = ["hyperdflash", "hyperdflash2"] if run is speed else list(VARIANTS)
        command.add_argument("--work", type=Path, default=Path("build/study"), help="of drafters")
        command.add_argument("--variants", nargs="+", choices=VARIANTS, default=names)
        command.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
        command.add_argument("--steps", type=int, default=2000, help="the committed ones: 6000")
        command.add_argument("--threads", type=int, default=1, help="of a training")
        if run is train:
            command.add_argument("--part", default="1/1", help="i/n: every n-th from the i-th")
            continue
        count = 10 if run is speed else 20
        command.add_argument("--data-dir", type=Path, help=f"of {', '.join(BENCHMARKS)}")
        command.add_argument("--num-prompts", type=int, default=count, help="of each set")
        if run is serve:
            command.add_argument("--repeats", type=int, default=6, help="of sampled prompts")
        else:
            command.add_argument("--temperatures", nargs="+", choices=SAMPLING, default=["0", "1"])
    args = parser.parse_args()
    try:
        args.run(args)
    except HyperDFlashError as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()

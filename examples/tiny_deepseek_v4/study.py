"""Train drafters of the tiny target that differ in one choice, serve them and compare.

From a checkout, with ``PYTHONPATH=.``:

    python examples/tiny_deepseek_v4/study.py serve --data-dir DATA/benchmarks --out build/accepted
    python examples/tiny_deepseek_v4/study.py speed --data-dir DATA/benchmarks --out build/speed

``serve`` measures the accept length at three temperatures, on held-out problems and on benchmarks,
and compares every greedy answer with the baseline's. ``speed`` measures tokens per second at one
request at a time. Both train the drafters that are missing. ``train`` only trains: once the
target's answers are in ``--work``, processes can share it (``--part 1/2``). ``report`` renders a
result again. All resume.
"""

import argparse
import json
import time
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import requests
from transformers import AutoTokenizer

import corpus
from eval import rivals
from eval.histograms import add_histograms
from exchange_prompts import BENCHMARK_SEED
from exchanges import KINDS, in_turn
from sglang_hyperdflash.cli import main as hyperdflash
from sglang_hyperdflash.serving.settings import COPY, DRAFT_TEMPERATURE, FULL, WIDTH
from sglang_hyperdflash.tools.acceptance import counters
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
Prompts = dict[str, list[list[int]]]  # set -> token ids of each prompt
Answers = dict[str, dict[str, list[dict]]]  # temperature -> set -> replies of the server


@dataclass(frozen=True)
class Variant:
    """What differs from HyperDFlash-2, which ``drafter.toml`` trains."""

    init: tuple[str, ...] = HEAD  # options of ``hyperdflash init``
    objective: Mapping[str, Any] = field(default_factory=dict)  # fields of the training file
    stage: Mapping[str, Any] = field(default_factory=dict)  # fields of the training file
    algorithm: str = "HYPERDFLASH"  # SGLang's name
    of: str | None = None  # the variant whose drafter this one serves
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
    "dflash, dependency head": Variant((LAYERS, "1", "3", "5", *HEAD)),
    "hyperdflash, argmax drafts": Variant(of="hyperdflash", draft_temperature="0"),
    "hyperdflash2, argmax drafts": Variant(of="hyperdflash2", draft_temperature="0"),
}


def training_file(variant: Variant, folder: Path, answers: Path, seed: int, steps: int) -> Path:
    """Write ``folder/train.toml``: ``drafter.toml`` with the variant's fields and these answers."""

    def lines(table: Mapping[str, Any]) -> str:  # JSON spells these values as TOML does
        return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())

    raw = tomllib.loads(TRAINING_FILE.read_text(encoding="utf-8"))
    answers, folder = answers.resolve(), folder.resolve()
    held_out = {p.stem.removeprefix("held_out_"): str(p) for p in answers.glob("held_out_*")}
    (stage,) = raw["stage"]
    data = [str(answers / f"{part}.jsonl") for part in ("greedy", "sampled")]
    tables = {
        "[held_out]": dict(sorted(held_out.items())),
        "[objective]": raw["objective"] | variant.objective,
        "[[stage]]": stage | variant.stage | {"seed": seed, "steps": steps, "data": data},
    }
    raw |= {"target": str(TARGET), "draft": str(folder / "new"), "out": str(folder / "trained")}
    text = lines({key: value for key, value in raw.items() if not isinstance(value, dict | list)})
    text += "".join(f"\n{title}\n{lines(table)}" for title, table in tables.items())
    write_text(folder / "train.toml", text)
    return folder / "train.toml"


@cache
def write_answers(work: Path) -> Path:
    """Return the folder of the target's answers; ask a server for those that are missing."""
    prompts, answers = work / "prompts", work / "answers"
    corpus.write(prompts)
    digest = bytes_hash(path.read_bytes() for path in sorted(prompts.glob("*.jsonl")))
    complete = answers / "complete"
    if complete.is_file() and complete.read_text() == digest:
        return answers
    with server_of(BASELINE, None, work / "answers.log").wait() as server:
        command = ["regenerate", "--server", server.url, "--target", str(TARGET)]
        command += ["--max-new-tokens", "128", "--top-p", "1", "--top-k", "-1"]
        for path in sorted(prompts.glob("*.jsonl")):
            temperatures = {path.stem: "1" if path.stem == "sampled" else "0"}
            if path.stem.startswith("held_out_"):
                temperatures[f"{path.stem}_sampled"] = "1"
            for name, temperature in temperatures.items():
                files = ["--input", str(path), "--output", str(answers / f"{name}.jsonl")]
                if hyperdflash([*command, *files, "--temperature", temperature]):
                    raise SystemExit(f"{answers}: see above, or choose another --work.")
    write_text(complete, digest)
    return answers


def drafter_of(name: str, seed: int, args: argparse.Namespace) -> Path:
    """Return the folder of the variant's trained drafter; train it first if it is missing."""
    name = VARIANTS[name].of or name
    variant, answers = VARIANTS[name], write_answers(args.work)
    folder = args.work / name / f"seed-{seed}"
    parts = ((answers / f"{part}.jsonl").read_bytes() for part in ("greedy", "sampled"))
    path, expected = folder / "trained.json", {"steps": args.steps, "answers": bytes_hash(parts)}
    recorded = json.loads(path.read_text()) if path.is_file() else None
    if recorded == expected:
        return folder / "trained"
    if recorded is not None:
        raise SystemExit(f"{folder}: expected {expected}, found {recorded}. Choose another --work.")
    config = training_file(variant, folder, answers, seed, args.steps)
    init = ["init", "--target", str(TARGET), "--out", str(folder / "new"), "--seed", str(seed)]
    training = ["train", "--config", str(config), "--states", str(args.work / "states")]
    training += ["--work", str(folder / "work"), "--threads", str(args.threads)]
    for command in ([*init, *SHAPE, *variant.init], training):
        if hyperdflash(command):
            raise SystemExit(f"{folder}: hyperdflash {command[0]} failed.")
    if variant.algorithm == "DFLASH":  # the same tensors; SGLang's own class serves them
        config = folder / "trained" / "config.json"
        write_json(config, json.loads(config.read_text()) | {"architectures": ["DFlashDraftModel"]})
    write_json(path, expected)
    return folder / "trained"


def read_prompts(data_dir: Path | None, count: int) -> Prompts:
    """Return at most ``count`` prompts of each set: held-out problems by kind, and benchmarks."""
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


def begin(args: argparse.Namespace, **setting: Any) -> tuple[Prompts, dict[str, Any]]:
    """Return the prompts and the result so far; exit if its setting was another one."""
    prompts = read_prompts(args.data_dir, args.num_prompts)
    sampling = {t: SAMPLING[t] | {"max_new_tokens": MAX_NEW} for t in args.temperatures}
    digest = bytes_hash([json.dumps(prompts).encode()])
    setting = {"sampling": sampling, "prompts": digest, **setting}
    path = args.out / "results.json"
    result = json.loads(path.read_text()) if path.is_file() else {"setting": setting, "seeds": {}}
    changed = [name for name in setting if result["setting"].get(name) != setting[name]]
    if changed:
        raise SystemExit(f"{path}: measured with other {', '.join(changed)}. Choose another --out.")
    return prompts, result


def server_of(name: str, drafter: Path | None, log: Path, *options: str) -> Server:
    """Start a server of a variant, or of the baseline, which has no drafter."""
    arguments, environment = [*comparable_arguments(), *options], {}
    if drafter is not None:
        arguments += ["--speculative-algorithm", VARIANTS[name].algorithm]
        arguments += ["--speculative-draft-model-path", str(drafter)]
        temperature = VARIANTS[name].draft_temperature
        environment = {WIDTH: FULL, COPY: "0", DRAFT_TEMPERATURE: temperature}
    environment |= rivals.environment(arguments)
    return Server(TARGET, *arguments, log=log, environment=environment)


def pending(result: dict, seed: int, args: argparse.Namespace) -> Iterator[tuple[str, Path]]:
    """Yield unmeasured variants and their drafters, which are trained if they are missing.

    Exits if the measuring of a variant was begun with another drafter.
    """
    weights = result.setdefault("weights", {}).setdefault(str(seed), {})
    for name in (n for n in args.variants if n not in result["seeds"].get(str(seed), {})):
        drafter = drafter_of(name, seed, args)
        digest = file_hash(drafter / "model.safetensors")
        if weights.setdefault(name, digest) != digest:
            raise SystemExit(
                f"{name}, seed {seed}: measured with other weights. Choose another --out."
            )
        yield name, drafter


def counts_of(answers: list[dict], prompts: int) -> list[list[int]]:
    """Return verification rounds and accepted drafts of each of so many prompts.

    ``answers`` are of every prompt, then of every prompt again, and so on.
    """
    histograms = [counters(answer["meta_info"])[2] for answer in answers]
    totals = [add_histograms(histograms[prompt::prompts]) for prompt in range(prompts)]
    return [[sum(h), sum(k * rounds for k, rounds in enumerate(h))] for h in totals]


def nats(answers: list[dict]) -> float:
    """Return minus the mean log probability of the answers' tokens."""
    values = [-x[0] for a in answers for x in a["meta_info"]["output_token_logprobs"]]
    return sum(values) / len(values)


def serve(args: argparse.Namespace) -> None:
    """Measure the accept length of every variant and seed."""
    prompts, result = begin(args)

    def measure(name: str, drafter: Path | None) -> tuple[Answers, list[list[int]]]:
        """Return the answers of a server of this drafter, and the tokens of the greedy ones."""

        def ask(job: tuple[list[int], dict]) -> dict:
            return server.generate(input_ids=job[0], sampling_params=job[1], return_logprob=True)

        answers: Answers = {}
        server = server_of(name, drafter, args.work / "server.log")
        with server.wait(), ThreadPoolExecutor(CONCURRENCY) as pool:
            for t, parameters in result["setting"]["sampling"].items():
                repeats = args.repeats if parameters["temperature"] else 1
                answers[t] = {
                    k: list(pool.map(ask, [(ids, parameters) for ids in token_ids * repeats]))
                    for k, token_ids in prompts.items()
                }
        return answers, [a["output_ids"] for replies in answers["0"].values() for a in replies]

    expected: list[list[int]] = []
    for seed in args.seeds:
        for name, drafter in pending(result, seed, args):
            if not expected:
                answers, expected = measure(BASELINE, None)
                result["nats"] = {t: {k: nats(a) for k, a in s.items()} for t, s in answers.items()}
            answers, greedy = measure(name, drafter)
            result["seeds"].setdefault(str(seed), {})[name] = {
                "identical": sum(a == b for a, b in zip(greedy, expected, strict=True)),
                "answers": len(greedy),
                "repeats": args.repeats,
                "steps": args.steps,
                "counts": {
                    t: {k: counts_of(a, len(prompts[k])) for k, a in replies.items()}
                    for t, replies in answers.items()
                },
            }
            report(args, result)
            print(f"{name}, seed {seed}: measured", flush=True)
    report(args)


def timed(server: Server, prompt: list[int], sampling: dict[str, Any]) -> list[float]:
    """Measure tokens, seconds and seconds after the first token of one streamed request."""
    payload = {"input_ids": prompt, "sampling_params": sampling, "stream": True}
    started, first_token, event = time.monotonic(), None, {}
    with requests.post(f"{server.url}/generate", json=payload, stream=True, timeout=600) as reply:
        reply.raise_for_status()
        for line in reply.iter_lines():
            if line.startswith(b"data: {"):
                first_token = first_token or time.monotonic()
                event = json.loads(line[len(b"data: ") :])
    ended = time.monotonic()
    return [
        event["meta_info"]["completion_tokens"],
        ended - started,
        ended - (first_token or ended),
    ]


def speed(args: argparse.Namespace) -> None:
    """Measure tokens per second of one request at a time, all servers up.

    Each prompt is asked of all servers one right after another, and each server comes first, second
    and so on equally often: what slows a shared machine down for seconds slows them all alike. A
    second baseline server shows the noise.
    """
    prompts, result = begin(args, variants=args.variants)
    sampling = result["setting"]["sampling"]
    for seed in args.seeds:
        drafters = dict(pending(result, seed, args))
        if not drafters:
            continue
        with ExitStack() as stack:
            servers = {}
            for name, drafter in {BASELINE: None, NOISE: None, **drafters}.items():
                server = server_of(name, drafter, args.work / "speed.log", "--disable-radix-cache")
                servers[name] = stack.enter_context(server).wait()
            result["seeds"][str(seed)] = interleaved(servers, prompts, sampling)
        report(args, result)
    report(args)


def interleaved(servers: dict[str, Server], prompts: Prompts, sampling: dict) -> dict[str, Any]:
    """Return ``{server: {temperature: {set: [times, ...]}}}`` with the times of :func:`timed`."""
    times = {name: {t: {k: [] for k in prompts} for t in sampling} for name in servers}
    order = list(servers)
    for t, parameters in sampling.items():
        for server in servers.values():  # its first answers are its slowest
            for token_ids in prompts.values():
                timed(server, token_ids[-1], parameters)
        for set_name, token_ids in prompts.items():
            for prompt in token_ids:
                order.append(order.pop(0))
                for name in order:
                    times[name][t][set_name].append(timed(servers[name], prompt, parameters))
    return times


def train(args: argparse.Namespace) -> None:
    """Train this part's share of variants and seeds."""
    part, parts = map(int, args.part.split("/"))
    names = [name for name in args.variants if VARIANTS[name].of is None]
    for name, seed in [(name, seed) for seed in args.seeds for name in names][part - 1 :: parts]:
        print(drafter_of(name, seed, args), flush=True)


def report(args: argparse.Namespace, result: dict[str, Any] | None = None) -> None:
    """Render OUT/report.md from OUT/results.json."""
    if result is not None:  # else the file is there
        write_json(args.out / "results.json", result | {"provenance": provenance()})
    write_text(args.out / "report.md", render(json.loads((args.out / "results.json").read_text())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True)
    for command in (train, serve, speed, report):
        options = commands.add_parser(command.__name__, help=command.__doc__.splitlines()[0])
        options.set_defaults(run=command)
        add = options.add_argument
        if command is not train:
            add("--out", type=Path, required=True, help="folder of the result")
        if command is report:
            continue
        names = ["hyperdflash", "hyperdflash2"] if command is speed else list(VARIANTS)
        add("--work", type=Path, default=Path("build/study"), help="of drafters")
        add("--variants", nargs="+", choices=VARIANTS, default=names)
        add("--seeds", type=int, nargs="+", default=[0, 1, 2])
        add("--steps", type=int, default=2000, help="the committed ones: 6000")
        add("--threads", type=int, default=1, help="of a training")
        if command is train:
            add("--part", default="1/1", help="i/n: every n-th from the i-th")
            continue
        count = 10 if command is speed else 20
        add("--data-dir", type=Path, help=f"of {', '.join(BENCHMARKS)}")
        add("--num-prompts", type=int, default=count, help="of each set")
        if command is serve:
            add("--repeats", type=int, default=6, help="of sampled prompts")
            options.set_defaults(temperatures=list(SAMPLING))
        else:
            add("--temperatures", nargs="+", choices=SAMPLING, default=["0", "1"])
    args = parser.parse_args()
    try:
        args.run(args)
    except (HyperDFlashError, FileNotFoundError) as error:
        raise SystemExit(str(error)) from error


if __name__ == "__main__":
    main()

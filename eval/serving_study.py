"""The serving study that the paper leaves open: load, latency, and where a round's time goes.

The client is SGLang's own ``sglang.benchmark.serving``. One server is up at a time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eval.client import Sampling, converse_all
from eval.methods import Method
from eval.tables import LABELS, Table
from sglang_hyperdflash.serving.round_times import ROUND_TIMES, summarise
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import Server

LATENCIES = {
    "ttft_ms": ("median_ttft_ms", "p99_ttft_ms"),
    "tpot_ms": ("median_tpot_ms", "p99_tpot_ms"),
    "e2e_ms": ("median_e2e_latency_ms", "p99_e2e_latency_ms"),
}


@dataclass(frozen=True)
class Study:
    """What to load the servers with.

    rates: requests a second of the Poisson arrivals. prompts_per_level: requests of each load;
    at least four times the concurrency are sent.
    """

    target: str
    methods: tuple[Method, ...]
    prompts: list[list[str]]
    levels: tuple[int, ...]
    rates: tuple[float, ...]
    prompts_per_level: int
    max_new_tokens: int
    server_args: tuple[str, ...]
    out: Path
    threads: int | None = 1


def write_data(study: Study, path: Path) -> None:
    """The prompts in the form of the client's ``custom`` data set."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = []
    for turns in study.prompts:
        pair = [{"content": turns[0]}, {"content": "-"}]
        lines.append(json.dumps({"conversations": pair}) + "\n")
    path.write_text("".join(lines))


def load(study: Study, url: str, data: Path, count: int, *load_options: str) -> dict[str, Any]:
    """One run of the client; its numbers.

    Raises:
        subprocess.CalledProcessError: the client failed.
    """
    result = study.out / "client.jsonl"
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang"]
    command += ["--base-url", url, "--model", study.target, "--dataset-name", "custom"]
    command += ["--dataset-path", str(data), "--apply-chat-template", "--disable-ignore-eos"]
    command += ["--sharegpt-output-len", str(study.max_new_tokens), "--num-prompts", str(count)]
    command += ["--output-file", str(result), "--disable-tqdm", "--seed", "0", *load_options]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    found = json.loads(result.read_text().splitlines()[-1])
    numbers = {"requests": found["completed"], "tokens_per_s": found["output_throughput"]}
    for name, (middle, high) in LATENCIES.items():
        numbers[name] = [found[middle], found[high]]
    return numbers


def measure(study: Study, method: Method) -> dict[str, Any]:
    """One method under every load, then its round's shares in a server of its own."""
    arguments = (*study.server_args, *method.arguments)
    data, log = study.out / "prompts.jsonl", study.out / "logs" / f"{method.name}.log"
    found: dict[str, Any] = {"concurrency": [], "poisson": []}
    with Server(study.target, *arguments, log=log, threads=study.threads).wait() as server:
        load(study, server.url, data, 4, "--max-concurrency", "2")  # warm-up
        for level in study.levels:
            count = max(study.prompts_per_level, 4 * level)
            numbers = load(study, server.url, data, count, "--max-concurrency", str(level))
            found["concurrency"].append({"concurrency": level, **numbers})
        for rate in study.rates:
            count = study.prompts_per_level
            numbers = load(study, server.url, data, count, "--request-rate", str(rate))
            found["poisson"].append({"rate": rate, **numbers})
    times = study.out / f"{method.name}-rounds.jsonl"
    times.unlink(missing_ok=True)
    environment = {ROUND_TIMES: str(times.resolve())}
    server = Server(
        study.target, *arguments, log=log, threads=study.threads, environment=environment
    )
    with server.wait():
        converse_all(server.url, study.prompts[:8], Sampling(0.0, study.max_new_tokens), 1)
    found["round_ms"] = summarise(times, 1)
    return found


def run(study: Study, progress=print) -> dict[str, Any]:
    """Measure every method that ``serving.json`` does not hold yet, and write it."""
    path = study.out / "serving.json"
    content: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    content.setdefault("provenance", provenance())
    for part in ("concurrency", "poisson", "round_ms"):
        content.setdefault(part, {})
    write_data(study, study.out / "prompts.jsonl")
    for method in study.methods:
        if method.name in content["round_ms"]:
            continue
        progress(f"serving study: {method.name}")
        for part, numbers in measure(study, method).items():
            content[part][method.name] = numbers
        path.write_text(json.dumps(content, indent=1) + "\n")
    return content


def _pair(values: Sequence[float]) -> str:
    return " / ".join(f"{v:.0f}" for v in values)


def study_tables(content: dict[str, Any]) -> list[Table]:
    """Round shares, throughput by concurrency and latency by rate."""
    tables = []
    lines = []
    base = (content["round_ms"].get("target") or {}).get("target")
    for method, times in content["round_ms"].items():
        if times is None:
            continue
        parts = [times["target"], times["draft"], times["scheduler"]]
        step = "-" if not base else f"{sum(parts) / base:.2f}"
        lines.append((LABELS.get(method, method), (*(f"{v:.2f}" for v in parts), step)))
    heads = ("target pass, ms", "drafting and the rest, ms", "scheduling, ms", "target passes")
    tables.append(Table("A round at concurrency 1", heads, tuple(lines)))
    levels = sorted({e["concurrency"] for v in content["concurrency"].values() for e in v})
    heads = tuple(f"c {level}" for level in levels)
    lines = []
    for method, entries in content["concurrency"].items():
        own = {e["concurrency"]: e["tokens_per_s"] for e in entries}
        cells = tuple(f"{own[level]:.0f}" if level in own else "-" for level in levels)
        lines.append((LABELS.get(method, method), cells))
    tables.append(Table("Output tokens a second by concurrency", heads, tuple(lines)))
    for i, rate in enumerate({e["rate"]: 0 for v in content["poisson"].values() for e in v}):
        lines = tuple(
            (LABELS.get(m, m), tuple(_pair(entries[i][name]) for name in LATENCIES))
            for m, entries in content["poisson"].items()
            if i < len(entries)
        )
        heads = ("TTFT p50 / p99", "TPOT p50 / p99", "end to end p50 / p99")
        tables.append(Table(f"Poisson arrivals, {rate:g} a second, in ms", heads, lines))
    return tables


def study_lines(content: dict[str, Any]) -> list[str]:
    """The study as Markdown."""
    from eval.report import markdown

    lines = ["## Serving", ""]
    for table in study_tables(content):
        lines += markdown(table)
    return lines

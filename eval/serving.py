"""The serving study: throughput and latency by concurrency and by arrival rate.

The client is SGLang's own ``sglang.benchmark.serving``. One server is up at a time.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from eval.errors import EvalError, one_line
from eval.runner import Plan, Servers, read_run, read_sealed, write_sealed
from sglang_hyperdflash.tools.atomic import write_text
from sglang_hyperdflash.tools.errors import ServerFailed
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import API_KEY

KIND = "python -m eval serving"
FOLDER, RESULT = "serving", "serving.json"
PARTS = ("concurrency", "poisson")
LATENCIES = {
    "ttft_ms": ("median_ttft_ms", "p99_ttft_ms"),
    "tpot_ms": ("median_tpot_ms", "p99_tpot_ms"),
    "e2e_ms": ("median_e2e_latency_ms", "p99_e2e_latency_ms"),
}


@dataclass(frozen=True)
class Study:
    """What to load the plan's servers with; the plan's ``out`` is the study's own folder.

    prompts: first turns. rates: requests a second of the Poisson arrivals. requests: of each load;
    at least four times the concurrency are sent, and prompts are repeated where there are fewer.
    """

    plan: Plan
    prompts: tuple[str, ...]
    levels: tuple[int, ...]
    rates: tuple[float, ...]
    requests: int

    def settings(self) -> dict[str, Any]:
        """All that must not change between two runs into one folder."""
        own = {"levels": self.levels, "rates": self.rates, "requests": self.requests}
        return {**self.plan.settings(), **own}


def run_client(command: list[str], log: Path) -> None:
    """Run the client, its whole output into a log.

    Raises:
        EvalError: it failed; the message holds its last line and the log's path.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    key = os.environ.get(API_KEY)
    environment = os.environ | ({"OPENAI_API_KEY": key} if key else {})  # read by the client
    with log.open("ab") as sink:
        start, options = sink.tell(), {"stderr": subprocess.STDOUT, "env": environment}
        code = subprocess.run(command, stdout=sink, **options).returncode
    if code:
        said = log.read_bytes()[start:].decode(errors="replace").strip().splitlines()
        raise EvalError(
            f"the load client ended with code {code}: {said[-1] if said else 'it said nothing'}; "
            f"its output is in {log}. What was measured before is kept."
        )


def load(study: Study, url: str, count: int, *load_options: str) -> dict[str, Any]:
    """One run of the client with ``count`` requests; its numbers.

    Raises:
        EvalError: the client failed, or fewer requests were answered than asked for.
    """
    out = study.plan.out
    result, data, log = out / "client.jsonl", out / "prompts.jsonl", out / "logs" / "client.log"
    lines = []
    # The client draws requests from its file without repeating any, so they are repeated here.
    for i in range(max(count, len(study.prompts))):
        pair = [{"content": study.prompts[i % len(study.prompts)]}, {"content": "-"}]
        lines.append(json.dumps({"conversations": pair}) + "\n")
    write_text(data, "".join(lines))
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang"]
    command += ["--base-url", url, "--model", study.plan.target, "--dataset-name", "custom"]
    command += ["--dataset-path", str(data), "--apply-chat-template", "--disable-ignore-eos"]
    command += ["--sharegpt-output-len", str(study.plan.max_new_tokens)]
    command += ["--num-prompts", str(count), "--output-file", str(result), "--disable-tqdm"]
    run_client([*command, "--seed", "0", *load_options], log)
    found = json.loads(result.read_text().splitlines()[-1])
    if found["completed"] != count:
        raise EvalError(
            f"expected {count} answered requests, found {found['completed']}: the server refused "
            f"or aborted the others, and their load was not measured. {log} says why. A prompt "
            "longer than the target's context is refused: leave it out."
        )
    numbers = {"requests": found["completed"], "tokens_per_s": found["output_throughput"]}
    for name, (middle, high) in LATENCIES.items():
        numbers[name] = [found[middle], found[high]]
    return numbers


def measure(study: Study, url: str) -> dict[str, list[dict[str, Any]]]:
    """One method's server under every load."""
    found: dict[str, list[dict[str, Any]]] = {part: [] for part in PARTS}
    load(study, url, 4, "--max-concurrency", "2")  # warm-up
    for level in study.levels:
        count = max(study.requests, 4 * level)
        numbers = load(study, url, count, "--max-concurrency", str(level))
        found["concurrency"].append({"concurrency": level, **numbers})
    for rate in study.rates:
        numbers = load(study, url, study.requests, "--request-rate", str(rate))
        found["poisson"].append({"rate": rate, **numbers})
    return found


def run(study: Study) -> dict[str, Any]:
    """Measure every method that the study's file does not hold yet, and write it.

    Raises:
        EvalError: a server or the client failed; what was measured before is kept.
        WriteFailed: the disk is full.
    """
    out = study.plan.out
    content = read_sealed(out / RESULT) or {"provenance": provenance(), **{p: {} for p in PARTS}}
    with Servers(study.plan) as servers:
        for method in (m for m in study.plan.methods if m.name not in content["poisson"]):
            print(f"serving study: {method.name}", flush=True)
            try:
                numbers = measure(study, servers.url(method))
            except (ServerFailed, requests.RequestException) as error:
                raise EvalError(
                    f"serving study, {method.name}: {one_line(error)} Its server's log is in "
                    f"{out / 'logs'}. What was measured before is kept; run the same command again."
                ) from error
            for part in PARTS:
                content[part][method.name] = numbers[part]
            write_sealed(out / RESULT, content)
    return content


def check_drafts(study: Study, run: Path) -> None:
    """Refuse to put numbers of two drafters under one method's name.

    Args:
        run: the run's folder that the study is part of.

    Raises:
        EvalError: the run measured a method with another draft.
    """
    measured = read_run(run)["identities"]
    for method in study.plan.methods:
        now, before = method.identity(), measured.get(method.name) or {}
        for name in ("draft", "draft files"):
            if name in before and now.get(name) != before[name]:
                raise EvalError(
                    f"{run} has {method.name} with the {name} {before[name]}; this command has "
                    f"{now.get(name)}. Give --out the folder of a run with this draft."
                )


def read_study(out: Path) -> dict[str, Any] | None:
    """The serving study inside a run's folder; None where none was made.

    Raises:
        EvalError: its file is damaged.
    """
    path = out / FOLDER / RESULT
    if not path.is_file():
        return None
    content = read_sealed(path)
    if content is None:
        raise EvalError(f"{path} is damaged. Repeat the `eval serving` command to measure again.")
    return {name: content[name] for name in ("provenance", *PARTS)}

"""The serving study: throughput and latency by concurrency and by arrival rate.

The client is SGLang's own ``sglang.benchmark.serving``. One server is up at a time.
"""

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
# Median and 99th percentile of each latency, as the client names them.
LATENCIES = {
    "ttft_ms": ("median_ttft_ms", "p99_ttft_ms"),
    "tpot_ms": ("median_tpot_ms", "p99_tpot_ms"),
    "e2e_ms": ("median_e2e_latency_ms", "p99_e2e_latency_ms"),
}


@dataclass(frozen=True)
class Study:
    """The loads of a plan's servers; the plan's ``out`` is the study's own folder."""

    plan: Plan
    prompts: tuple[str, ...]  # first turns; repeated where a load has more requests
    levels: tuple[int, ...]  # requests in flight
    rates: tuple[float, ...]  # Poisson arrivals, requests a second
    requests: int  # of each load; at least four times its level are sent

    def settings(self) -> dict[str, Any]:
        """All that must not change between two runs into one folder."""
        loads = {"levels": self.levels, "rates": self.rates, "requests": self.requests}
        return {**self.plan.settings(), **loads}


def run_client(command: list[str], log: Path) -> None:
    """Run the client, its output appended to a log; raises ``EvalError`` with its last line."""
    log.parent.mkdir(parents=True, exist_ok=True)
    key = os.environ.get(API_KEY)
    environment = os.environ | ({"OPENAI_API_KEY": key} if key else {})  # read by the client
    with log.open("ab") as sink:
        start, options = sink.tell(), {"stderr": subprocess.STDOUT, "env": environment}
        code = subprocess.run(command, stdout=sink, **options).returncode
    if code:
        lines = log.read_bytes()[start:].decode(errors="replace").strip().splitlines()
        raise EvalError(
            f"the load client ended with code {code}: {lines[-1] if lines else 'it said nothing'}; "
            f"its output is in {log}. What was measured before is kept."
        )


def load(study: Study, url: str, count: int, *load_options: str) -> dict[str, Any]:
    """The numbers of one run of the client with ``count`` requests.

    Raises ``EvalError`` where the client failed or fewer requests were answered.
    """
    out, prompts = study.plan.out, study.prompts
    result, data, log = out / "client.jsonl", out / "prompts.jsonl", out / "logs" / "client.log"
    lines = []
    # The client draws requests from its file without repeating any, so they are repeated here.
    for i in range(max(count, len(prompts))):
        conversation = [{"content": prompts[i % len(prompts)]}, {"content": "-"}]
        lines.append(json.dumps({"conversations": conversation}) + "\n")
    write_text(data, "".join(lines))
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang"]
    command += ["--base-url", url, "--model", study.plan.target, "--dataset-name", "custom"]
    command += ["--dataset-path", str(data), "--apply-chat-template", "--disable-ignore-eos"]
    command += ["--sharegpt-output-len", str(study.plan.max_new_tokens)]
    command += ["--num-prompts", str(count), "--output-file", str(result), "--disable-tqdm"]
    run_client([*command, "--seed", "0", *load_options], log)
    report = json.loads(result.read_text().splitlines()[-1])
    if report["completed"] != count:
        raise EvalError(
            f"expected {count} answered requests, found {report['completed']}: the server refused "
            f"or aborted the others, and their load was not measured. {log} says why. A prompt "
            "longer than the target's context is refused: leave it out."
        )
    latencies = {name: [report[p50], report[p99]] for name, (p50, p99) in LATENCIES.items()}
    return {"requests": count, "tokens_per_s": report["output_throughput"], **latencies}


def measure(study: Study, url: str) -> dict[str, list[dict[str, Any]]]:
    """The numbers of one method's server under every load, by part of the study."""
    load(study, url, 4, "--max-concurrency", "2")  # warm-up
    concurrency, poisson = [], []
    for level in study.levels:
        count = max(study.requests, 4 * level)
        numbers = load(study, url, count, "--max-concurrency", str(level))
        concurrency.append({"concurrency": level, **numbers})
    for rate in study.rates:
        numbers = load(study, url, study.requests, "--request-rate", str(rate))
        poisson.append({"rate": rate, **numbers})
    return {"concurrency": concurrency, "poisson": poisson}


def run(study: Study) -> dict[str, Any]:
    """Measure every method that the study's file does not hold yet, and write it.

    Raises ``EvalError`` where a server or the client failed, ``WriteFailed`` for a full disk.
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
    """Raise ``EvalError`` if the run in folder ``run`` has another draft under a method's name."""
    identities = read_run(run)["identities"]
    for method in study.plan.methods:
        identity, measured = method.identity(), identities.get(method.name) or {}
        for name in ("draft", "draft files"):
            if name in measured and identity.get(name) != measured[name]:
                raise EvalError(
                    f"{run} has {method.name} with the {name} {measured[name]}; this command has "
                    f"{identity.get(name)}. Give --out the folder of a run with this draft."
                )


def read_study(out: Path) -> dict[str, Any] | None:
    """The serving study in a run's folder, None without one; a damaged one is an ``EvalError``."""
    path = out / FOLDER / RESULT
    if not path.is_file():
        return None
    content = read_sealed(path)
    if content is None:
        raise EvalError(f"{path} is damaged. Repeat the `eval serving` command to measure again.")
    return {name: content[name] for name in ("provenance", *PARTS)}

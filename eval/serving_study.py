"""The serving study that the paper leaves open: load, latency, and where a round's time goes.

The client is SGLang's own ``sglang.benchmark.serving``. One server is up at a time.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import requests

from eval.client import Sampling, converse_all
from eval.errors import EvalError, one_line
from eval.methods import Method
from eval.runner import read_sealed
from sglang_hyperdflash.serving.round_times import ROUND_TIMES, summarise
from sglang_hyperdflash.tools.atomic import write_json, write_text
from sglang_hyperdflash.tools.checksum import CHECKSUM, sealed, short_hash
from sglang_hyperdflash.tools.errors import ServerFailed
from sglang_hyperdflash.tools.ownership import location
from sglang_hyperdflash.tools.provenance import provenance
from sglang_hyperdflash.tools.server_process import Server

KIND = "python -m eval serving"
FOLDER, RESULT = "serving", "serving.json"
PARTS = ("concurrency", "poisson", "round_ms")
LATENCIES = {
    "ttft_ms": ("median_ttft_ms", "p99_ttft_ms"),
    "tpot_ms": ("median_tpot_ms", "p99_tpot_ms"),
    "e2e_ms": ("median_e2e_latency_ms", "p99_e2e_latency_ms"),
}


@dataclass(frozen=True)
class Study:
    """What to load the servers with.

    rates: requests a second of the Poisson arrivals. prompts_per_level: requests of each load;
    at least four times the concurrency are sent, the prompts over again where there are fewer.
    out: the study's own folder.
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
    start_minutes: float = 15.0

    def settings(self) -> dict[str, Any]:
        """All that must not change between two runs; methods may be added later."""
        return {
            "target": location(self.target),
            "prompts": short_hash(self.prompts),
            "levels": list(self.levels),
            "rates": list(self.rates),
            "prompts_per_level": self.prompts_per_level,
            "max_new_tokens": self.max_new_tokens,
            "server_args": list(self.server_args),
            "threads": self.threads,
        }


def write_data(study: Study, path: Path, count: int) -> None:
    """At least ``count`` prompts in the form of the client's ``custom`` data set.

    The client draws requests from the file without repeating any, so prompts are repeated here.
    """
    lines = []
    for i in range(max(count, len(study.prompts))):
        turns = study.prompts[i % len(study.prompts)]
        pair = [{"content": turns[0]}, {"content": "-"}]
        lines.append(json.dumps({"conversations": pair}) + "\n")
    write_text(path, "".join(lines))


def run_client(command: list[str], log: Path) -> None:
    """Run the client, its whole output into a log.

    Raises:
        EvalError: it failed; the message holds its last line and the log's path.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("ab") as sink:
        start = sink.tell()
        code = subprocess.run(command, stdout=sink, stderr=subprocess.STDOUT).returncode
    if code:
        with log.open("rb") as file:
            file.seek(start)
            said = file.read().decode(errors="replace").strip().splitlines()
        raise EvalError(
            f"the load client ended with code {code}: {said[-1] if said else 'it said nothing'}; "
            f"all it said is in {log}. What was measured before is kept."
        )


def load(study: Study, url: str, count: int, *load_options: str) -> dict[str, Any]:
    """One run of the client with ``count`` requests; its numbers.

    Raises:
        EvalError: the client failed, or fewer requests were answered than asked for.
    """
    result, log = study.out / "client.jsonl", study.out / "logs" / "client.log"
    data = study.out / "prompts.jsonl"
    write_data(study, data, count)
    result.unlink(missing_ok=True)
    command = [sys.executable, "-m", "sglang.benchmark.serving", "--backend", "sglang"]
    command += ["--base-url", url, "--model", study.target, "--dataset-name", "custom"]
    command += ["--dataset-path", str(data), "--apply-chat-template", "--disable-ignore-eos"]
    command += ["--sharegpt-output-len", str(study.max_new_tokens), "--num-prompts", str(count)]
    command += ["--output-file", str(result), "--disable-tqdm", "--seed", "0", *load_options]
    run_client(command, log)
    found = json.loads(result.read_text().splitlines()[-1])
    if found["completed"] != count:
        raise EvalError(
            f"expected {count} answered requests, found {found['completed']}: the server refused "
            f"or broke off the others, and their load was not measured. {log} says why. A prompt "
            "longer than the target's context is refused: leave it out."
        )
    numbers = {"requests": found["completed"], "tokens_per_s": found["output_throughput"]}
    for name, (middle, high) in LATENCIES.items():
        numbers[name] = [found[middle], found[high]]
    return numbers


def measure(study: Study, method: Method) -> dict[str, Any]:
    """One method under every load, then its round's shares in a server of its own."""
    arguments = (*study.server_args, *method.arguments)
    log = study.out / "logs" / f"{method.name}.log"
    found: dict[str, Any] = {"concurrency": [], "poisson": []}
    width = dict(method.environment)
    measured = Server(study.target, *arguments, log=log, threads=study.threads, environment=width)
    with measured as server:
        server.wait(60 * study.start_minutes)
        load(study, server.url, 4, "--max-concurrency", "2")  # warm-up
        for level in study.levels:
            count = max(study.prompts_per_level, 4 * level)
            numbers = load(study, server.url, count, "--max-concurrency", str(level))
            found["concurrency"].append({"concurrency": level, **numbers})
        for rate in study.rates:
            count = study.prompts_per_level
            numbers = load(study, server.url, count, "--request-rate", str(rate))
            found["poisson"].append({"rate": rate, **numbers})
    times = study.out / f"{method.name}-rounds.jsonl"
    times.unlink(missing_ok=True)
    environment = {**width, ROUND_TIMES: str(times.resolve())}
    timed = Server(
        study.target, *arguments, log=log, threads=study.threads, environment=environment
    )
    with timed as server:
        server.wait(60 * study.start_minutes)
        converse_all(server.url, study.prompts[:8], Sampling(0.0, study.max_new_tokens), 1)
    found["round_ms"] = summarise(times, 1)
    return found


def run(study: Study, progress: Callable[[str], None] = print) -> dict[str, Any]:
    """Measure every method that the study's file does not hold yet, and write it.

    Raises:
        EvalError: a method was measured with another draft, or a server or the client failed; what
            was measured before is kept.
        WriteFailed: the disk is full.
    """
    path = study.out / RESULT
    content: dict[str, Any] = read_sealed(path) or {}
    content.pop(CHECKSUM, None)
    content.setdefault("provenance", provenance())
    identities = content.setdefault("identities", {})
    check_identities(study.methods, identities, path)
    for part in PARTS:
        content.setdefault(part, {})
    for method in study.methods:
        if method.name in content["round_ms"]:
            continue
        progress(f"serving study: {method.name}")
        try:
            numbers = measure(study, method)
        except (ServerFailed, requests.RequestException) as error:
            log = study.out / "logs" / f"{method.name}.log"
            raise EvalError(
                f"serving study, {method.name}: {one_line(error)} The server's log is {log}. "
                "What was measured before is kept; run the same command again."
            ) from error
        for part in PARTS:
            content[part][method.name] = numbers[part]
        identities[method.name] = method.identity()
        write_json(path, sealed(content), indent=1)
    return content


def check_identities(
    methods: Sequence[Method], measured: Mapping[str, Mapping[str, Any]], where: Path
) -> None:
    """Refuse to put numbers of two drafters under one method's name.

    Args:
        measured: what each method was when it was measured (``Method.identity``). where: the file
            that says so.

    Raises:
        EvalError: a method's draft is another one.
    """
    for method in methods:
        now, before = method.identity(), measured.get(method.name) or {}
        for name in ("draft", "draft files"):
            if name in before and now.get(name) != before[name]:
                raise EvalError(
                    f"{where} has {method.name} with the {name} {before[name]}; this command has "
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

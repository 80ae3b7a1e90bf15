"""The first visit to a GPU in one command: ``make gpu-visit``, or ``python -m tests.gpu.visit``.

Every step is tried; after each, ``visit.json`` holds what was found so far. The command fails when
a check did. ``--small`` walks the same steps on a CPU with the tests' small DeepSeek-V4.
"""

import argparse
import json
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path

import torch

from sglang_hyperdflash.tools.provenance import provenance
from tests.conftest import ROOT
from tests.engine.conftest import Servers
from tests.gpu.stage import CPU, GPU
from tests.gpu.steps import STEPS, Visit

OUT = ROOT / "eval" / "results" / "gpu"


def run(visit: Visit, only: list[str] | None) -> dict:
    """Walk the steps; ``visit.json`` is written after each."""
    report = {"provenance": provenance(), "small": not visit.stage.gpu, "steps": {}}
    for name in only or STEPS:
        begun, own = time.monotonic(), replace(visit, found={}, failed=[])
        print(f"{name}: {STEPS[name].__doc__.splitlines()[0]}", flush=True)
        try:
            STEPS[name](own)
        except Exception as error:
            own.failed.append(f"{type(error).__name__}: {error}"[:2000])
            traceback.print_exc()
        seconds = round(time.monotonic() - begun, 1)
        step = {"seconds": seconds, "failed": own.failed, "found": own.found}
        report["steps"][name] = step
        visit.out.mkdir(parents=True, exist_ok=True)
        (visit.out / "visit.json").write_text(json.dumps(report, indent=1) + "\n")
        print(json.dumps(step, indent=1), flush=True)
    return report


def main(arguments: list[str] | None = None) -> int:
    """0 when every check held, 1 when one did not, 2 without a GPU."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.visit", description=__doc__)
    parser.add_argument("--out", type=Path, default=OUT, help="folder of the results")
    parser.add_argument("--only", nargs="+", choices=STEPS, help="some of the steps")
    parser.add_argument("--small", action="store_true", help="on a CPU, with a small target")
    args = parser.parse_args(arguments)
    if not args.small and not torch.cuda.is_available():
        parser.exit(2, "no CUDA device is visible; --small walks the same steps on a CPU.\n")
    stage = CPU if args.small else GPU
    with tempfile.TemporaryDirectory() as name:
        folder, servers = Path(name), Servers()
        try:
            target = stage.write_target(folder / "target")
            drafter = stage.write_drafter(folder / "drafter")
            report = run(Visit(stage, servers, folder, args.out, target, drafter), args.only)
        finally:
            for running in list(servers.running):
                servers.stop(running)
    return int(any(step["failed"] for step in report["steps"].values()))


if __name__ == "__main__":
    raise SystemExit(main())

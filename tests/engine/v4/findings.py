"""The numbers that the V4 tests find, kept in ``build/v4_on_cpu.json`` with where they came from.

Tests that are run apart add to the same file; ``eval/results/v4_on_cpu`` holds a copy, and its
table: ``python -m tests.engine.v4.findings``.
"""

import json
from typing import Any

from sglang_hyperdflash.tools.provenance import provenance
from tests.conftest import ROOT

PATH = ROOT / "build" / "v4_on_cpu.json"


def note(what: str, **numbers: Any) -> None:
    """Keep and print what one run showed."""
    PATH.parent.mkdir(exist_ok=True)
    report = json.loads(PATH.read_text()) if PATH.is_file() else {"found": {}}
    report["provenance"] = origin = provenance()
    report["found"][what] = {**numbers, "commit": origin["commit"]}
    PATH.write_text(json.dumps(report, indent=1) + "\n")
    print(what, json.dumps(numbers), flush=True)


def shown(value: Any) -> str:
    """A number, or a list of them, in few digits."""
    if isinstance(value, float):
        return f"{value:.3g}"
    return " ".join(map(shown, value)) if isinstance(value, list) else str(value)


if __name__ == "__main__":
    print("| run | found |\n|---|---|")
    for run, numbers in json.loads(PATH.read_text())["found"].items():
        cells = (f"{name}: {shown(x)}" for name, x in numbers.items() if name != "commit")
        print(f"| {run} | {'; '.join(cells)} |")

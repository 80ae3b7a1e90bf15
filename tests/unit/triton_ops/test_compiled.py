"""Every kernel compiled ahead of time: nothing spills, and no number changes unseen.

``compiled.json`` is what was reviewed; ``python -m tests.unit.triton_ops.test_compiled`` writes it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import PATIENCE

REVIEWED = Path(__file__).with_name("compiled.json")
# Those of servers; the others take as long, and `make slow-test` compiles them.
SERVERS, OTHERS = ("90", "100"), ("80", "120")
Found = dict[str, dict[str, Any]]


def report(sizes: list[str], dtypes: list[str], architectures: tuple[str, ...]) -> list[dict]:
    """The report, from a process of its own: in this one the kernels may be interpreted."""
    command = [sys.executable, "-m", "triton_ops.compile_report", "--json", "--sizes", *sizes]
    ended = subprocess.run(
        [*command, "--dtypes", *dtypes, "--architectures", *architectures],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        # FlashInfer names another assembler, where it finds one.
        env={k: v for k, v in os.environ.items() if not k.startswith("TRITON_")},
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def check(usage: list[dict]) -> None:
    """Nothing spills, and a program fits a multiprocessor."""
    assert [row for row in usage if row["stack_bytes"] or row["programs"] < 1] == []


def by_name(usage: list[dict]) -> Found:
    """One entry for each kernel and architecture."""
    keys = ("threads", "registers", "shared_bytes", "programs")
    return {
        f"{row['kernel']}, sm_{row['architecture']}": {key: row[key] for key in keys}
        | row["instructions"]
        for row in usage
    }


def served(architectures: tuple[str, ...]) -> list[dict]:
    """A round's kernels on some architectures, and the reducer's on Hopper."""
    return report(["4x4096", "4x7168"], ["bfloat16"], architectures)


def changes(old: Found, new: Found) -> list[str]:
    """A line for every number that differs."""
    return [
        f"{name}: {key} was {old.get(name, {}).get(key)}, is {new.get(name, {}).get(key)}"
        for name in sorted(old | new)
        for key in sorted(old.get(name, {}) | new.get(name, {}))
        if old.get(name, {}).get(key) != new.get(name, {}).get(key)
    ]


@pytest.mark.parametrize(
    "architectures", [SERVERS, pytest.param(OTHERS, marks=pytest.mark.slow)], ids="-".join
)
def test_nothing_spills_and_every_number_is_the_reviewed_one(architectures):
    usage = served(architectures)
    check(usage)
    chosen = tuple(f"sm_{name}" for name in architectures)
    reviewed = {
        name: numbers
        for name, numbers in json.loads(REVIEWED.read_text()).items()
        if name.startswith("gate ") or name.endswith(chosen)
    }
    assert changes(reviewed, by_name(usage)) == []
    tiles = [row for row in usage if row["kernel"].endswith(": tile")]
    # What the reducer's lag between stats and apply items counts on.
    assert len(tiles) == 2 and all(row["programs"] >= 2 for row in tiles)


def test_a_changed_number_is_named_with_the_old_and_the_new_one():
    old, new = {"a, sm_90": {"registers": 40}}, {"a, sm_90": {"registers": 48}}
    assert changes(old, new) == ["a, sm_90: registers was 40, is 48"]
    assert changes(old, {}) == ["a, sm_90: registers was 40, is None"]


@pytest.mark.slow
def test_every_number_of_paths_and_dtype_compiles_without_spills():
    sizes = ["1x4096", "2x4096", "8x4096", "4x4096"]
    check(report(sizes, ["bfloat16", "float16", "float32"], ("90",)))


if __name__ == "__main__":
    lines = [
        f" {json.dumps(k)}: {json.dumps(v)}" for k, v in by_name(served(SERVERS + OTHERS)).items()
    ]
    REVIEWED.write_text("{\n" + ",\n".join(lines) + "\n}\n")

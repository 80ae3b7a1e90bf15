"""The matrix. Every run: a short form of ``train``, without an engine. ``make fault-test``: all.

One test a cell, so that a part can be asked for: ``-k "capture and Ctrl"``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.faults import subjects
from tests.faults.matrix import FAULTS, Cell, Subject, run_cell, table, undisturbed
from tests.warm_start import client

SHORT = ("kill -9 at 50%", "disk full", "second run")
SUBJECTS: dict[str, Callable[[Path], Subject]] = {
    "train": subjects.training,
    "learn": subjects.learning,
    "train-of-two": lambda shared: subjects.training(shared, processes=2),
    "regenerate": subjects.regenerating,
    "eval-run": subjects.comparing,
    "generate": subjects.generating,
    "capture": subjects.capturing,
}
# Forked from a process that has done the imports: what every run of the tests can afford.
WARM = {"train-warm": lambda shared: subjects.training(shared, start=client.start)}
# One process has no helper; a comparison writes no file of lines.
CANNOT = {(name, "helper dies") for name in ("train", "learn")} | {("eval-run", "torn last line")}


def cells() -> Iterator[Any]:
    """Every command with every fault that can befall it."""
    for name in SUBJECTS:
        for fault in FAULTS:
            if (name, fault) not in CANNOT:
                yield pytest.param(name, fault, id=f"{name}-{fault}".replace(" ", "-"))


class Matrix:
    """Subjects with the results of their undisturbed runs, made when first asked for."""

    def __init__(self, shared: Path, root: Path) -> None:
        self.shared, self.root = shared, root
        self.known: dict[str, tuple[Subject, Any]] = {}
        self.cells: list[Cell] = []

    def run(self, name: str, fault: str) -> Cell:
        """One cell; a table of all so far is in ``build/faults.txt``."""
        if name not in self.known:
            subject = (SUBJECTS | WARM)[name](self.shared)
            self.known[name] = (subject, undisturbed(subject, self.root))
        subject, expected = self.known[name]
        cell = run_cell(subject, fault, self.root, expected)
        self.cells.append(cell)
        (ROOT / "build").mkdir(exist_ok=True)
        (ROOT / "build" / "faults.txt").write_text(table(self.cells) + "\n")
        return cell


@pytest.fixture(scope="module")
def matrix(tmp_path_factory):
    """What the cells of this file share; its table is printed at the end."""
    shared = tmp_path_factory.mktemp("faults")
    subjects.prepare(shared)
    made = Matrix(shared, tmp_path_factory.mktemp("cells"))
    yield made
    print("\n" + table(made.cells))


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("fault", SHORT)
def test_training_survives_one_fault_of_each_kind(matrix, fault):
    cell = matrix.run("train-warm", fault)
    assert cell.good, cell


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name, fault", cells())
def test_a_re_run_gives_what_an_undisturbed_run_gives(matrix, name, fault):
    cell = matrix.run(name, fault)
    assert cell.good, cell

"""The matrix. Every run: a short form of ``train``, without an engine. ``make fault-test``: all."""

from __future__ import annotations

import pytest

from tests.conftest import ROOT
from tests.faults import subjects
from tests.faults.matrix import HALVES, Cell, applies, in_peace, run_cell, table

SHORT = ("kill -9 at 50%", "disk full", "second run")


def matrix(subject, root, faults) -> list[Cell]:
    """All cells of a subject; what they showed is printed before anything is asserted."""
    expected = in_peace(subject, root)
    cells = [run_cell(subject, f, root, expected) for f in faults if applies(subject, f)]
    print("\n" + table(cells))
    with (ROOT / "build" / "faults.txt").open("a") as report:
        report.write(table(cells) + "\n")
    for cell in cells:
        assert cell.good, f"{cell.subject}, {cell.fault}: {cell.said}"
    return cells


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    (ROOT / "build").mkdir(exist_ok=True)
    folder = tmp_path_factory.mktemp("faults")
    subjects.prepare(folder)
    return folder


@pytest.mark.timeout(1800)
def test_training_survives_one_fault_of_each_kind(shared, tmp_path):
    matrix(subjects.training(shared), tmp_path, SHORT)


@pytest.mark.faults
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("processes", [1, 2])
def test_training_survives_every_fault(shared, tmp_path, processes, half):
    matrix(subjects.training(shared, processes), tmp_path, HALVES[half])


@pytest.mark.faults
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("command", [subjects.regenerating, subjects.comparing])
def test_commands_that_ask_a_server_survive_every_fault(
    shared, tmp_path, server_port, command, half
):
    matrix(command(shared, server_port), tmp_path, HALVES[half])


@pytest.mark.faults
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("command", [subjects.generating, subjects.capturing])
def test_commands_with_an_engine_survive_every_fault(shared, tmp_path, command, half):
    matrix(command(shared), tmp_path, HALVES[half])


@pytest.fixture(scope="module")
def server_port(tmp_path_factory):
    """One tiny server for all that ask one."""
    from sglang_hyperdflash.tools.server_process import Server

    options = ("--dtype", "float32", "--max-total-tokens", "8192", "--mem-fraction-static", "0.2")
    log = tmp_path_factory.mktemp("server") / "server.log"
    with Server(subjects.TARGET, *options, log=log) as server:
        yield server.wait(900).port

"""The matrix; one test a cell, so that a part can be asked for: ``-k "capture and Ctrl"``."""

import itertools
from collections.abc import Callable

import pytest

from tests.faults import subjects
from tests.faults.matrix import FAULTS, Runs, Subject, different

SUBJECTS: dict[str, type[Subject]] = {
    "train": subjects.Training,
    "learn": subjects.Learning,
    "train-of-two": subjects.TrainingOfTwo,
    "generate": subjects.Generating,
    "capture": subjects.Capturing,
}
CANNOT = {(name, "helper dies") for name in ("train", "learn")}  # one process has none
CELLS = [cell for cell in itertools.product(SUBJECTS, FAULTS) if cell not in CANNOT]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Callable[[str], tuple[Subject, list]]:
    """A subject by name and its result, made when it is first asked for."""
    shared, known = tmp_path_factory.mktemp("faults"), {}
    subjects.prepare(shared)

    def made(name: str) -> tuple[Subject, list]:
        if name not in known:
            subject = SUBJECTS[name](shared)
            runs = Runs(subject, tmp_path_factory.mktemp("undisturbed") / "run")
            known[name] = (subject, runs.finish())
        return known[name]

    return made


@pytest.mark.faults
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name, fault", CELLS)
def test_a_re_run_gives_what_an_undisturbed_run_gives(undisturbed, tmp_path, name, fault):
    subject, expected = undisturbed(name)
    runs = Runs(subject, tmp_path / "run")
    FAULTS[fault](runs)
    tolerated = fault == "flipped byte" and not subject.hashed
    assert different(expected, runs.finish()) <= tolerated

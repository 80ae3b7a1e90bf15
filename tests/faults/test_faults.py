"""The matrix. Every run: one kill of ``train``, without an engine. ``make fault-test``: all.

One test a cell, so that a part can be asked for: ``-k "capture and Ctrl"``.
"""

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
    "train-warm": subjects.TrainingWarm,
}
CANNOT = {(name, "helper dies") for name in ("train", "learn")}  # one process has none
SHORT = [("train-warm", "kill -9 at 50%")]
EVERY = [(name, fault) for name in SUBJECTS if name != "train-warm" for fault in FAULTS]
CELLS = [pytest.param(*cell, marks=pytest.mark.faults) for cell in EVERY if cell not in CANNOT]


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


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name, fault", SHORT + CELLS)
def test_a_re_run_gives_what_an_undisturbed_run_gives(undisturbed, tmp_path, name, fault):
    subject, expected = undisturbed(name)
    runs = Runs(subject, tmp_path / "run")
    FAULTS[fault](runs)
    tolerated = fault == "flipped byte" and not subject.hashed
    assert different(expected, runs.finish()) <= tolerated

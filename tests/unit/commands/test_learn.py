"""``hyperdflash learn`` as a process: it waits, resumes after a kill, and refuses a second one."""

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hyperdflash.training.local_target import LocalTarget
from sglang_hyperdflash.training.trainer import saved_states
from tests.unit.shards import split
from tests.unit.training.streams import add, learn_arguments, new_drafter, recorded, writer
from tests.waiting import PATIENCE, until
from tests.warm_start.client import run_command, start_command

pytestmark = [pytest.mark.heavy, pytest.mark.slow]


def wait_until(holds: Callable[[], bool], process: subprocess.Popen) -> None:
    until(lambda: process.poll() is not None or holds())
    assert process.poll() is None


def test_a_learner_waits_is_alone_and_resumes(target_dir, tmp_path):
    """By paths from its working folder, of which only the draft's is there at first, in shards."""
    target, here, log = LocalTarget(target_dir), Path(), tmp_path / "log"
    new_drafter(target).save(tmp_path / "draft")
    split(tmp_path / "draft")

    def line(made: Path = here) -> list[str]:
        small = "--batch 4 --every 2 --judges 4 --threads 1 --device cpu"
        return learn_arguments(target_dir, here, made, small)

    with log.open("wb") as sink:
        streams = {"stdout": sink, "stderr": subprocess.STDOUT}
        first = start_command(*line(), **streams, cwd=tmp_path)
        wait_until(lambda: "waiting: " in log.read_text(), first)
        with writer(tmp_path / "store", target) as opened:
            add(opened, recorded(target, 60))
        wait_until(lambda: saved_states(tmp_path / "work"), first)
        refused = run_command(*line(Path("other")), timeout=PATIENCE, cwd=tmp_path)
        assert refused.returncode == 2 and refused.stderr.count("\n") == 1
        assert f"{here / 'store' / 'learner'} is in use by process {first.pid}" in refused.stderr
        first.send_signal(signal.SIGKILL)
        first.wait()
        step = int(saved_states(tmp_path / "work")[-1].stem.partition("-")[2])
        log.write_bytes(b"")
        second = start_command(*line(), **streams, cwd=tmp_path)
        wait_until(lambda: f"resumed at step {step}" in log.read_text(), second)
        wait_until(lambda: "not judged" in log.read_text(), second)
        second.send_signal(signal.SIGTERM)
        assert second.wait(PATIENCE) == 143, log.read_text()
    assert list((tmp_path / "work" / "tensorboard").iterdir())

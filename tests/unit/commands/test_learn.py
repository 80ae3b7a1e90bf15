"""``hyperdflash learn``: it waits, resumes after a kill, and refuses a second one."""

import os
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from sglang_hyperdflash.cli import main
from sglang_hyperdflash.training.checkpoints import saved_states
from sglang_hyperdflash.training.local_target import LocalTarget
from tests.unit.shards import split
from tests.unit.training.streams import add, learn_arguments, new_drafter, recorded, writer
from tests.waiting import PATIENCE, until
from tests.warm_start.client import start_command

pytestmark = pytest.mark.heavy
SMALL = "--batch 4 --every 2 --judges 4 --threads 1 --device cpu"


def wait_until(holds: Callable[[], bool], process: subprocess.Popen) -> None:
    until(lambda: process.poll() is not None or holds())
    assert process.poll() is None


def test_a_second_learner_is_refused_while_one_waits_for_samples(
    target_dir, tmp_path, monkeypatch, capsys
):
    target, codes, options = LocalTarget(target_dir), [], f"{SMALL} --passes 1"
    new_drafter(target).save(tmp_path / "draft")
    with writer(tmp_path / "store", target) as opened:
        add(opened, recorded(target, 30))

    def waits(_seconds: float) -> None:
        codes.append(main(learn_arguments(target_dir, tmp_path, tmp_path / "other", options)))
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(time, "sleep", waits)
    with pytest.raises(SystemExit) as ended:
        main(learn_arguments(target_dir, tmp_path, tmp_path, options))
    assert (codes, ended.value.code) == ([2], 143)
    assert f"{tmp_path / 'store' / 'learner'} is in use" in capsys.readouterr().err
    assert saved_states(tmp_path / "work")[1:]


@pytest.mark.slow
def test_a_learner_waits_and_resumes(target_dir, tmp_path):
    """By paths from its working folder, of which only the draft's is there at first, in shards."""
    target, here, log = LocalTarget(target_dir), Path(), tmp_path / "log"
    new_drafter(target).save(tmp_path / "draft")
    split(tmp_path / "draft")
    line = learn_arguments(target_dir, here, here, SMALL)
    with log.open("wb") as sink:
        streams = {"stdout": sink, "stderr": subprocess.STDOUT}
        first = start_command(*line, **streams, cwd=tmp_path)
        wait_until(lambda: "waiting: " in log.read_text(), first)
        with writer(tmp_path / "store", target) as opened:
            add(opened, recorded(target, 60))
        wait_until(lambda: saved_states(tmp_path / "work")[1:], first)
        first.send_signal(signal.SIGKILL)
        first.wait()
        step = int(saved_states(tmp_path / "work")[-1].stem.partition("-")[2])
        log.write_bytes(b"")
        second = start_command(*line, **streams, cwd=tmp_path)
        wait_until(lambda: f"resumed at step {step}" in log.read_text(), second)
        wait_until(lambda: "not judged" in log.read_text(), second)
        second.send_signal(signal.SIGTERM)
        assert second.wait(PATIENCE) == 143, log.read_text()
    assert list((tmp_path / "work" / "tensorboard").iterdir())

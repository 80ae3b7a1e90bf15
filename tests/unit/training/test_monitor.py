"""A run's scalars: what TensorBoard reads, and what a full disk does."""

import errno

import pytest

from sglang_hyperdflash.tools.atomic import WriteFailed
from sglang_hyperdflash.training.monitor import ScalarFile


def read(folder):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    events = accumulator.EventAccumulator(str(folder))
    events.Reload()
    return {
        name: [(e.step, e.value) for e in events.Scalars(name)] for name in events.Tags()["scalars"]
    }


def test_tensorboard_reads_the_scalars(tmp_path):
    file = ScalarFile(tmp_path, 0)
    file.add({"train/loss": 2.5, "held_out/tau": 1.25}, 1)
    file.add({"train/loss": 1.5}, 2)  # readable before close
    assert read(tmp_path) == {"train/loss": [(1, 2.5), (2, 1.5)], "held_out/tau": [(1, 1.25)]}
    file.close()


def test_a_resumed_run_voids_the_steps_that_it_repeats(tmp_path):
    first = ScalarFile(tmp_path, 0)
    for step in (1, 2, 3):
        first.add({"train/loss": float(step)}, step)
    first.close()
    again = ScalarFile(tmp_path, 2)
    again.add({"train/loss": 20.0}, 2)
    again.close()
    assert read(tmp_path) == {"train/loss": [(1, 1.0), (2, 20.0)]}


def test_a_full_disk_is_one_error_with_the_path(tmp_path):
    """Found as: a thread's traceback, and an error without a path."""
    file = ScalarFile(tmp_path, 0)
    file.file.close()
    file.path.unlink()
    with open("/dev/full", "wb", buffering=0) as full:
        file.records._writer = full
        with pytest.raises(WriteFailed, match=rf"cannot write {file.path}: ") as caught:
            file.add({"train/loss": 1.0}, 1)
    assert caught.value.__cause__.errno == errno.ENOSPC


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "tensorboard").write_text("a file")
    with pytest.raises(WriteFailed, match=r"cannot write .*tensorboard"):
        ScalarFile(tmp_path / "tensorboard", 0)

"""The measuring script of stores runs, and counts what it reads."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.waiting import PATIENCE


def measured(folder, *options: str) -> dict:
    command = [sys.executable, str(ROOT / "examples" / "store_rates.py"), "--folder", str(folder)]
    command += ["--shards", "3", "--samples", "4", "--tokens", "50", "--batches", "6", *options]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=PATIENCE)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_it_measures_a_small_store(tmp_path):
    for _ in range(2):  # the second finds the store
        found = measured(tmp_path / "store", "--batch", "2", "--paths", "2", "--width", "16")
        assert (found["samples"], found["tokens"]) == (12, 600)
        assert found["read_bytes"] == 12 * 50 * (2 * 16 * 2 + 4)
        assert min(found[name] for name in ("read_mib_s", "disk_mib_s", "start_seconds")) > 0


@pytest.mark.slow
def test_it_measures_a_training_of_two_processes(tmp_path, target_dir, drafter_dir):
    options = ("--target", str(target_dir), "--draft", str(drafter_dir), "--steps", "3")
    found = measured(tmp_path / "store", *options, "--batch", "4", "--states-dtype", "fp8")
    assert found["read_bytes"] == 24 * 50 * (4 * (256 + 4) + 4)
    assert 0 <= found["data_wait"] < 1 and found["trained_samples_s"] > 0

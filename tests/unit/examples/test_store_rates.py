"""The measuring script of stores runs, and counts what it reads."""

from __future__ import annotations

import json
import subprocess
import sys

from tests.conftest import ROOT


def test_it_measures_a_small_store(tmp_path):
    sizes = {"shards": 3, "samples": 4, "tokens": 50, "paths": 2, "width": 16}
    options = [text for name, size in sizes.items() for text in (f"--{name}", str(size))]
    command = [sys.executable, str(ROOT / "examples" / "store_rates.py"), *options]
    command += ["--folder", str(tmp_path / "store"), "--batches", "6", "--batch", "2"]
    for _ in range(2):  # the second finds the store
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=120)
        assert done.returncode == 0, done.stderr[-2000:]
        found = json.loads(done.stdout)
        assert (found["samples"], found["tokens"]) == (12, 600)
        assert found["read_bytes"] == 12 * 50 * 2 * 16 * 2
        assert min(found[name] for name in ("read_mib_s", "disk_mib_s", "start_seconds")) > 0

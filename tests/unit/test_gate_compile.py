"""The kernels compiled for Hopper (sm_90) ahead of time, on any machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

SIZES = ("4x4096", "4x7168", "1x4096", "2x4096", "8x4096")


@pytest.fixture(scope="module")
def usage():
    """The report, from a process of its own: in this one the kernels may be interpreted."""
    command = [sys.executable, "-m", "triton_ops.compile_report", "--json", "--sizes"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [*command, *SIZES, "--dtypes", "bfloat16", "float32"],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout)


def test_every_kernel_compiles_and_spills_nothing(usage):
    assert len(usage) == len(SIZES) * 2 * 5
    assert [row for row in usage if row["spilled_bytes"]] == []


def test_every_kernel_fits_a_multiprocessor(usage):
    for row in usage:
        assert row["registers"] * row["threads"] <= 65536, row
        assert row["shared_bytes"] <= 227 * 1024, row


def test_two_tile_programs_share_a_multiprocessor(usage):
    """What the lag between stats and apply items counts on, at the served widths."""
    served = [
        r for r in usage if r["kernel"] == "tile" and r["dtype"] == "bfloat16" and r["m"] <= 4
    ]
    for row in served:
        assert 2 * row["registers"] * row["threads"] <= 65536, row
        assert 2 * (row["shared_bytes"] + 1024) <= 227 * 1024, row

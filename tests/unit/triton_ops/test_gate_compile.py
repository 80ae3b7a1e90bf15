"""The kernels compiled for Hopper (sm_90) ahead of time, on any machine."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

KERNELS, GUMBEL_KERNELS = 5, 2


def report(sizes: list[str], dtypes: list[str]) -> list[dict]:
    """The report, from a process of its own: in this one the kernels may be interpreted."""
    command = [sys.executable, "-m", "triton_ops.compile_report", "--json"]
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    ended = subprocess.run(
        [*command, "--sizes", *sizes, "--dtypes", *dtypes],
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    assert ended.returncode == 0, ended.stderr
    usage = json.loads(ended.stdout)
    assert len(usage) == KERNELS * len(sizes) * len(dtypes) + GUMBEL_KERNELS
    return usage


def check(usage: list[dict]) -> None:
    """Nothing spills, and a program fits a multiprocessor."""
    assert [row for row in usage if row["spilled_bytes"]] == []
    for row in usage:
        assert row["registers"] * row["threads"] <= 65536, row
        assert row["shared_bytes"] <= 227 * 1024, row


def test_at_the_served_widths_nothing_spills_and_two_tile_programs_share_a_multiprocessor():
    usage = report(["4x4096", "4x7168"], ["bfloat16"])
    check(usage)
    # What the lag between stats and apply items counts on.
    for row in (row for row in usage if row["kernel"] == "tile"):
        assert 2 * row["registers"] * row["threads"] <= 65536, row
        assert 2 * (row["shared_bytes"] + 1024) <= 227 * 1024, row


@pytest.mark.slow
def test_every_number_of_paths_and_dtype_compiles_without_spills():
    check(report(["1x4096", "2x4096", "8x4096", "4x4096"], ["bfloat16", "float16", "float32"]))

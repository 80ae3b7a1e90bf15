"""Paths shared by all tests."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = ROOT / "examples" / "tiny_deepseek_v4"
BENCHMARKS = ROOT.parent / "shared" / "data" / "benchmarks"


@pytest.fixture(scope="session")
def target_dir() -> Path:
    return EXAMPLE / "target"


@pytest.fixture(scope="session")
def drafter_dir() -> Path:
    return EXAMPLE / "drafter"

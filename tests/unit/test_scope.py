"""What the plugin changes for servers of other algorithms: what ``plugin.load`` says, no more."""

from __future__ import annotations

import os
from unittest import mock

import pytest
import torch

# What SGLang itself sets while it is imported is there before.
from sglang.srt.arg_groups import resolution_hooks  # noqa: F401
from sglang.srt.speculative import spec_registry  # noqa: F401

from sglang_hyperdflash import plugin
from sglang_hyperdflash.seams import Seam

THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}


@pytest.fixture
def load(monkeypatch):
    """Load the plugin: the environment that it adds, and the hooks that it installs."""

    def run(accelerator: bool, **environment: str) -> tuple[dict[str, str], tuple[Seam, ...]]:
        monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
        installed: list[Seam] = []
        monkeypatch.setattr(plugin.seams, "install", installed.extend)
        with mock.patch.dict(os.environ):
            for name in (*THREADS, "SGLANG_USE_CPU_ENGINE"):
                os.environ.pop(name, None)
            os.environ.update(environment)
            before = dict(os.environ)
            plugin.load()
            changed = {name: v for name, v in os.environ.items() if before.get(name) != v}
            assert before.keys() <= os.environ.keys()
        return changed, tuple(installed)

    return run


def test_with_an_accelerator_nothing_but_hooks_for_ours(load):
    assert load(True) == ({}, plugin.SERVING_SEAMS)


def test_without_one_threads_and_the_cpu_platform_s_hooks(load):
    added, installed = load(False)
    assert added == THREADS
    assert installed == (*plugin.SERVING_SEAMS, *plugin.CPU_SEAMS)


def test_a_user_s_threads_and_sglang_s_cpu_engine_stay(load):
    added, _ = load(False, OMP_NUM_THREADS="5")
    assert added == {"OMP_WAIT_POLICY": "PASSIVE"}
    assert load(False, SGLANG_USE_CPU_ENGINE="1") == ({}, plugin.SERVING_SEAMS)

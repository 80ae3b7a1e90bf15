"""What the plugin changes for servers of other algorithms: what ``plugin.load`` says, no more."""

import os
from unittest import mock

import pytest
import torch

# What SGLang itself sets while it is imported is there before.
from sglang.srt.arg_groups import resolution_hooks  # noqa: F401
from sglang.srt.speculative import spec_registry  # noqa: F401

from sglang_hyperdflash import plugin

THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
ON_CPU = (*plugin.SERVING_SEAMS, *plugin.CPU_SEAMS)


@pytest.mark.parametrize(
    "accelerator, given, added, installed",
    [
        (True, {}, {}, plugin.SERVING_SEAMS),
        (False, {}, THREADS, ON_CPU),
        (False, {"OMP_NUM_THREADS": "5"}, {"OMP_WAIT_POLICY": "PASSIVE"}, ON_CPU),
        (False, {"SGLANG_USE_CPU_ENGINE": "1"}, {}, plugin.SERVING_SEAMS),
    ],
    ids=["accelerator", "none", "a user's threads", "SGLang's CPU engine"],
)
def test_only_a_host_without_an_accelerator_changes_for_others(
    monkeypatch, accelerator, given, added, installed
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    seams = []
    monkeypatch.setattr(plugin.seams, "install", seams.extend)
    with mock.patch.dict(os.environ):
        for name in (*THREADS, "SGLANG_USE_CPU_ENGINE"):
            os.environ.pop(name, None)
        os.environ.update(given)
        before = dict(os.environ)
        plugin.load()
        assert dict(os.environ) == before | added
    assert tuple(seams) == installed

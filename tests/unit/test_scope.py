"""What the plugin changes for servers of other algorithms: what ``plugin.load`` says, no more."""

import os
import sys
from unittest import mock

import pytest
import torch

# What SGLang itself sets while it is imported is there before.
from sglang.srt.arg_groups import resolution_hooks  # noqa: F401
from sglang.srt.speculative import spec_registry  # noqa: F401

from sglang_hyperdflash import plugin
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError

THREADS = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
ASKED = {"HYPERDFLASH_CPU": "1"}
ON_CPU = (*plugin.SERVING_SEAMS, *plugin.CPU_SEAMS)


@pytest.mark.parametrize(
    "accelerator, given, added, installed",
    [
        (True, ASKED, {}, plugin.SERVING_SEAMS),
        (False, {}, {}, plugin.SERVING_SEAMS),
        (False, ASKED, THREADS, ON_CPU),
        (False, ASKED | {"OMP_NUM_THREADS": "5"}, {"OMP_WAIT_POLICY": "PASSIVE"}, ON_CPU),
    ],
    ids=["accelerator", "not asked for", "asked for", "a user's threads"],
)
def test_only_a_host_without_an_accelerator_changes_for_others_where_it_is_asked_for(
    monkeypatch, accelerator, given, added, installed
):
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: accelerator)
    seams = []
    monkeypatch.setattr(plugin.seams, "install", seams.extend)
    with mock.patch.dict(os.environ):
        for name in (*THREADS, *ASKED):
            os.environ.pop(name, None)
        os.environ.update(given)
        before = dict(os.environ)
        plugin.load()
        assert dict(os.environ) == before | added
    assert tuple(seams) == installed


def test_only_our_refusals_are_printed_without_a_traceback(monkeypatch, capsys):
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(plugin.seams, "install", lambda seams: None)
    with mock.patch.dict(os.environ):
        plugin.load()
    said = []
    for error in (HyperDFlashConfigError("Use 1."), ValueError("other")):
        try:
            raise error
        except ValueError as raised:
            sys.excepthook(type(raised), raised, raised.__traceback__)
        said.append(capsys.readouterr().err)
    assert said[0].count("\n") == 1 and said[0].endswith("Use 1.\n")
    assert "Traceback" in said[1] and "other" in said[1]

"""Which servers load the plugin, and when it acts."""

import os
from importlib import metadata

import pytest

from eval import rivals
from eval.methods import resolve
from eval.rivals import plugin
from tests.conftest import ROOT


def test_servers_of_sglangs_own_speculation_load_it_and_no_result_holds_a_folder(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "before")
    methods = resolve(["baseline", "mtp6", "hyperdflash6"], {"hyperdflash_draft": "d"}, {})
    given = {method.name: rivals.environment(method.arguments) for method in methods}
    assert given["baseline"] == given["hyperdflash6"] == {}
    installed, root, kept = given["mtp6"]["PYTHONPATH"].split(os.pathsep)
    assert (root, kept) == (str(ROOT), "before")
    (package,) = metadata.distributions(path=[installed])
    (entry,) = package.entry_points
    assert (entry.group, entry.load()) == ("sglang.srt.plugins", plugin.load)
    assert not any(str(ROOT) in str(method.identity()) for method in methods)


@pytest.mark.parametrize("active", [True, False])
def test_it_acts_on_the_cpu_platform_alone(monkeypatch, active):
    called, own_dtype = [], {"HYPERDFLASH"}
    monkeypatch.setattr(plugin.activation, "is_active", lambda: active)
    monkeypatch.setattr(plugin.dflash_seams, "own_dtype", own_dtype)
    monkeypatch.setattr(plugin, "install", called.extend)
    monkeypatch.setattr(plugin, "when_imported", lambda *given: called.append(given))
    plugin.load()
    expected = len(plugin.SEAMS) + len(plugin.SAMPLING_MODULES) + 1
    assert len(called) == (expected if active else 0)
    assert ("DFLASH" in own_dtype) is active

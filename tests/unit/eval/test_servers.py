"""Which methods share a server: those whose servers would be the same."""

from __future__ import annotations

import argparse

import pytest

from eval import runner
from eval.client import Answer
from eval.methods import Method, resolve
from eval.runner import Plan, Servers, with_noise_floor, write_run

METHODS = ["baseline", "hyperdflash6", "hyperdflash-adaptive"]


@pytest.fixture
def started(monkeypatch) -> list[dict]:
    """Environments of the servers that were started, in order; each has an address of its own."""
    found: list[dict] = []

    class Started:
        def __init__(self, *_, environment: dict, **__) -> None:
            found.append(environment)
            self.url = f"http://127.0.0.1:{len(found)}"
            self.process = argparse.Namespace(poll=lambda: None)

        def wait(self, seconds: float) -> None:
            pass

        def stop(self) -> None:
            pass

    monkeypatch.setattr(runner, "Server", Started)
    monkeypatch.setattr(runner, "converse", lambda *_: Answer())
    return found


def plan(tmp_path, methods, **more) -> Plan:
    settings = {"target": "any", "prompts": {}, "cells": (), "rounds": 1, "max_new_tokens": 4}
    return Plan(methods=with_noise_floor(methods), out=tmp_path, **settings, **more)


@pytest.mark.parametrize("together", [True, False])
def test_methods_that_differ_in_their_environment_alone_have_servers_of_their_own(
    tmp_path, started, together
):
    """Found as: the adaptive width's numbers were those of the full-width server."""
    methods = resolve(METHODS, {"hyperdflash_draft": "d"}, {})
    asked = plan(tmp_path, methods, together=together)
    by_name = {m.name: m for m in asked.methods}
    assert by_name["hyperdflash6"].arguments == by_name["hyperdflash-adaptive"].arguments
    with Servers(asked) as servers:
        urls = {name: servers.url(by_name[name]) for name in METHODS}
        assert len(set(urls.values())) == 3
        assert started == [dict(by_name[name].environment) for name in METHODS]
        assert started[1] != started[2]
        last = by_name["hyperdflash-adaptive"]
        assert servers.url(last) == urls[last.name] and len(started) == 3
        assert len(servers.running) == (3 if together else 1)


def test_the_noise_floor_is_of_the_baseline_s_own_server(tmp_path, started):
    target = Method("baseline", ("--dtype", "float32"), 0, None, (("NAME", "value"),))
    asked = plan(tmp_path, [target])
    with Servers(asked) as servers:
        assert [m.name for m in asked.methods] == ["baseline", "baseline-again"]
        assert len({servers.url(m) for m in asked.methods}) == 1
    assert started == [{"NAME": "value"}]


def test_a_run_s_file_names_no_folder_of_the_machine(tmp_path):
    (tmp_path / "drafter").mkdir()
    methods = resolve(("baseline", "hyperdflash6"), {"hyperdflash_draft": tmp_path / "drafter"}, {})
    write_run(plan(tmp_path, methods, server_args=("--log", str(tmp_path / "x.log"))))
    text = (tmp_path / "run.json").read_text()
    assert str(tmp_path) not in text
    assert text.count('".../drafter"') == 2 and '".../x.log"' in text

"""A process forked from a template is what an ordinary start gives, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import ROOT
from tests.waiting import PATIENCE, until
from tests.warm_start import client
from tests.warm_start.asking import Refused

CHILD = [sys.executable, "-m", "tests.unit.warm_child"]
# Each process has its own.
OWN = ("parent", "process", "session", "random", "as told", "warm", "changed")
# A tester that starts a child warm and is killed: prints the template's id and what the child said.
KILLED = """
import subprocess, sys, time
from pathlib import Path
from tests.warm_start.client import Template
template = Template(["wave"], Path(sys.argv[1]))
command = [sys.executable, "-m", "tests.unit.warm_child", "wait"]
child = template.start(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
print(template.process.pid, flush=True)
print(child.stdout.readline(), flush=True)
time.sleep(7200)
"""


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    made = client.Template(["wave"], tmp_path_factory.mktemp("template") / "log")
    yield made
    made.stop()


def environment(**changes: str) -> dict[str, str]:
    return {**os.environ, **client.ENVIRONMENT, **changes}


def answers(start, folder: Path, **changes: str) -> list[dict]:
    """What a child and two that it spawned say of themselves."""
    log = folder / "log"
    with log.open("w") as sink:
        process = start(
            [*CHILD, "one", "two words"],
            stdout=sink,
            stderr=subprocess.STDOUT,
            env=environment(**changes),
            cwd=folder,
            start_new_session=True,
        )
    assert process.wait(PATIENCE) == 7, log.read_text()
    found = json.loads(log.read_text())
    assert found[0]["parent"] == os.getpid() and found[0]["process"] == process.pid
    return found


def without(found: dict, names: tuple[str, ...] = OWN) -> dict:
    return {name: value for name, value in found.items() if name not in names}


def test_a_forked_child_finds_what_an_ordinary_one_finds(template, tmp_path):
    """Arguments, environment, folder, path, descriptors, session; and those that it spawns."""
    path = os.pathsep.join((str(tmp_path / "first"), str(ROOT)))
    changes = {"PYTHONPATH": path, "SAID": "so"}
    warm, cold = (answers(s, tmp_path, **changes) for s in (template.start, subprocess.Popen))
    assert [f["warm"] for f in warm] == [True] * 3 and not any(f["warm"] for f in cold)
    assert warm[0]["environment"]["SAID"] == "so"
    assert warm[0]["arguments"][1:] == ["one", "two words"]
    assert warm[0]["leads"] and [f["code"] for f in warm[1:]] == [3, 3]
    for a, b in zip(warm, cold, strict=True):
        assert without(a) == without(b)


def test_spawned_processes_are_children_that_saw_nothing_of_their_parent(template, tmp_path):
    first, *spawned = answers(template.start, tmp_path)
    assert first["changed"]
    for found in spawned:
        assert found["parent"] == first["process"] and found["session"] == first["process"]
        assert found["as told"] == found["process"] and not found["changed"]
    assert len({found["random"] for found in (first, *spawned)}) == 3


@pytest.mark.parametrize(
    "command, options, why",
    [
        (["-m", "json"], {"OMP_NUM_THREADS": "2"}, "OMP_NUM_THREADS"),
        (["-m", "json"], {"PYTHONHASHSEED": "1"}, "PYTHONHASHSEED"),
        (["-m", "json"], {"PYTHONPATH": "{shadow}"}, "wave.py"),
        (["-X", "dev"], {}, "not a plain command line"),
    ],
)
def test_what_would_be_another_process_is_refused(template, tmp_path, command, options, why):
    (tmp_path / "wave.py").touch()
    changes = {name: value.format(shadow=tmp_path) for name, value in options.items()}
    with pytest.raises(Refused, match=why):
        template.start([sys.executable, *command], env=environment(**changes))
    # It goes on.
    done = template.start([sys.executable, "-c", "raise SystemExit(5)"], env=environment())
    assert done.wait(PATIENCE) == 5


def test_a_variable_that_an_import_reads_is_refused_when_it_is_another(tmp_path, monkeypatch):
    (tmp_path / "reader.py").write_text("import os\nSEEN = os.environ.get('READ_EARLY')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))
    made = client.Template(["reader"], tmp_path / "log")
    try:
        for name, value in (("READ_LATE", "1"), ("READ_EARLY", "1")):
            code = f"import os; raise SystemExit(os.environ['{name}'] == '1')"
            command = [sys.executable, "-c", code]
            if name == "READ_LATE":
                assert made.start(command, env=environment(**{name: value})).wait(PATIENCE) == 1
            else:
                with pytest.raises(Refused, match=name):
                    made.start(command, env=environment(**{name: value}))
    finally:
        made.stop()


@pytest.mark.parametrize(
    "command, variable, value, why",
    [
        ([sys.executable, "-c", "raise SystemExit(4)"], client.SWITCH, "0", "=0"),
        ([sys.executable, "-c", "raise SystemExit(4)"], "OMP_NUM_THREADS", "3", "was read"),
        (["sh", "-c", "exit 4"], "ANY", "", "begins neither with"),
        ([sys.executable, "-c", "raise SystemExit(4)"], "ANY", "", None),
    ],
)
def test_everything_else_is_started_in_the_ordinary_way(
    template, monkeypatch, command, variable, value, why
):
    """And noted with the reason; the last case is started warm."""
    if client.why_ordinary([sys.executable, "-c", ""]):
        pytest.skip("the template is switched off here")
    monkeypatch.setattr(client, "_template", template)
    monkeypatch.setattr(client, "ordinary_starts", [])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv(variable, value)
    process = client.start(command)
    assert process.wait(PATIENCE) == 4
    assert (type(process) is subprocess.Popen) == bool(why)
    assert [(c, why in reason) for c, reason in client.ordinary_starts] == [(command, True)] * bool(
        why
    )


def test_a_template_whose_imports_start_a_thread_says_so(tmp_path, monkeypatch):
    source = "import threading, time\n"
    source += "threading.Thread(target=time.sleep, args=(7200,), daemon=True).start()\n"
    (tmp_path / "threaded.py").write_text(source)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(tmp_path), str(ROOT))))
    with pytest.raises(RuntimeError, match="starts threads"):
        client.Template(["threaded"], tmp_path / "log")


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_signals_end_a_forked_child_as_any_other(template, how):
    """And its whole group can be killed, the clean copy in it."""
    codes = []
    for start in (template.start, subprocess.Popen):
        process = waiting(start)
        family = [process.pid, *children(process.pid)]
        os.kill(process.pid, how)
        codes.append(process.wait(PATIENCE))
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        wait_until_gone(family)
    assert codes[0] == codes[1] == -how


def test_a_spawned_process_can_be_killed(template):
    process = waiting(template.start)
    try:
        found = json.loads(process.said)
        assert {f["process"] for f in found[1:]} <= set(children(process.pid))
        os.kill(found[1]["process"], signal.SIGKILL)
        until(lambda: psutil.Process(found[1]["process"]).status() == psutil.STATUS_ZOMBIE)
        assert process.poll() is None
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(PATIENCE)


def waiting(start) -> subprocess.Popen:
    """A child that waits, having said what it found (``said``)."""
    process = start(
        [*CHILD, "wait"],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
        start_new_session=True,
    )
    process.said = process.stdout.readline()
    return process


def children(pid: int) -> list[int]:
    return [child.pid for child in psutil.Process(pid).children(recursive=True)]


def wait_until_gone(pids: list[int]) -> None:
    """All of these processes end."""
    until(lambda: not any(map(running, pids)), "processes were left")


def running(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGKILL])
def test_nothing_is_left_of_a_tester_that_is_killed(tmp_path, how):
    tester = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path / "log")],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=environment(),
        cwd=ROOT,
    )
    made = int(tester.stdout.readline())
    family = [made, *(found["process"] for found in json.loads(tester.stdout.readline()))]
    assert all(map(running, family))
    tester.send_signal(how)
    tester.wait(PATIENCE)
    wait_until_gone([*family, *children_of_none(family)])


def children_of_none(family: list[int]) -> list[int]:
    """Processes of the sessions of ``family``."""
    found = []
    for pid in psutil.pids():
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) in family:
                found.append(pid)
    return found

"""A process forked from the template is what an ordinary start gives."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from multiprocessing import get_context
from pathlib import Path

import psutil
import pytest

from tests.waiting import PATIENCE
from tests.warm_start import client

pytestmark = pytest.mark.heavy

ROOT = Path(__file__).resolve().parents[2]
CHILD = [sys.executable, "-m", "tests.unit.test_warm_start", "two words"]


def facts() -> dict:
    """What a process knows of itself, and what differs from start to start."""
    return {
        "arguments": sys.argv[1:],
        "environment": {n: os.environ.get(n) for n in ("TEST_SAID", "PYTHONPATH")},
        "path": str(ROOT) in sys.path,
        "folder": os.getcwd(),
        "interrupt": signal.getsignal(signal.SIGINT) is signal.default_int_handler,
        "changed": "colorsys" in sys.modules,
        "ids": [os.getpid(), os.getppid(), os.getsid(0), "wave" in sys.modules],
    }


def tell(pipe) -> None:
    pipe.send(facts())
    sys.exit(3)


@pytest.fixture(scope="module")
def template():
    return client.Template("wave")


@pytest.mark.parametrize("warm", [True, False])
def test_a_child_and_what_it_spawns(template, warm):
    options = {"env": {**template.environment, "TEST_SAID": "so", "PYTHONPATH": str(ROOT)}}
    options |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    options |= {"start_new_session": True}
    assert template.gives(options)
    process = (client.Forked if warm else lambda _, *a, **k: subprocess.Popen(*a, **k))(
        template, CHILD, **options
    )
    child, spawned, code = json.loads(process.stdout.readline())
    pid, parent, session, forked = child.pop("ids")
    assert (pid, parent, session, forked) == (process.pid, os.getpid(), process.pid, warm)
    assert spawned.pop("ids")[1:] == [pid, pid, warm] and code == 3
    expected = {"arguments": ["two words"], "path": True, "folder": os.getcwd(), "interrupt": True}
    expected["environment"] = {"TEST_SAID": "so", "PYTHONPATH": str(ROOT)}
    assert child == expected | {"changed": True} and spawned == expected | {"changed": False}
    family = psutil.Process(pid).children(recursive=True)
    os.killpg(pid, signal.SIGKILL)
    assert process.wait(PATIENCE) == -signal.SIGKILL
    assert not psutil.wait_procs(family, timeout=PATIENCE)[1]


def test_what_an_import_may_have_read_is_started_in_the_ordinary_way(template):
    assert not template.gives({"env": {**template.environment, "OMP_NUM_THREADS": "3"}})
    assert not template.gives({"env": template.environment, "cwd": "/"})


if __name__ == "__main__":
    import colorsys  # noqa: F401

    from tests.unit.test_warm_start import tell as target

    ends = get_context("spawn").Pipe()
    spawned = get_context("spawn").Process(target=target, args=(ends[1],))
    spawned.start()
    told = ends[0].recv()
    spawned.join()
    print(json.dumps([facts(), told, spawned.exitcode]), flush=True)
    sys.stdin.read()

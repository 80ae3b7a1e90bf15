"""A process forked from the template is what an ordinary start gives."""

import json
import os
import subprocess
import sys
from functools import partial

import pytest

from tests.conftest import ROOT
from tests.waiting import PATIENCE
from tests.warm_start import client

pytestmark = pytest.mark.heavy

FACTS = """
import json, os, signal, sys
facts = [sys.argv[1:], os.environ["TEST_SAID"], sys.argv[2] in sys.path, os.getcwd()]
facts += [signal.getsignal(signal.SIGINT) is signal.default_int_handler, sys.stdin.read()]
facts += [os.getpid(), os.getppid(), os.getsid(0), "wave" in sys.modules]
print(json.dumps(facts))
sys.exit(3)
"""


@pytest.fixture(scope="module")
def template():
    return client.Template("wave")


@pytest.mark.parametrize("warm", [True, False])
def test_a_child(template, warm):
    environment = {**template.environment, "TEST_SAID": "so", "PYTHONPATH": str(ROOT / "docs")}
    options = {"env": environment, "text": True, "start_new_session": True}
    options |= {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    assert template.gives(options)
    command = [sys.executable, "-c", FACTS, "two words", str(ROOT / "docs")]
    process = (partial(client.Forked, template) if warm else subprocess.Popen)(command, **options)
    said, _ = process.communicate("asked", PATIENCE)
    ids = [process.pid, os.getpid(), process.pid]
    assert json.loads(said) == [command[3:], "so", True, os.getcwd(), True, "asked", *ids, warm]
    assert process.returncode == 3


def test_what_an_import_may_have_read_is_started_in_the_ordinary_way(template):
    assert not template.gives({"env": {**template.environment, "OMP_NUM_THREADS": "3"}})
    assert not template.gives({"env": template.environment, "cwd": "/"})

"""Questions to a test module that answers in a process of its own, as JSON."""

import json
import os
import subprocess
import sys
from typing import Any

from tests.conftest import ROOT
from tests.warm_start.client import ENVIRONMENT, finish

MARK = "ANSWER "
# ``python -m`` without garbage collections: they were a fifth of its imports.
RUN = "import gc, runpy, sys; gc.disable(); "
RUN += "runpy.run_module(sys.argv[1], run_name='__main__', alter_sys=True)"


def ask(module: str, question: Any, seconds: float = 300, **environment: str) -> Any:
    """What ``python -m module`` answers to a question, with imports of its own."""
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, module],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT, **environment},
        start_new_session=True,
    )
    done = finish(process, seconds, json.dumps(question))
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix(MARK))


def question() -> Any:
    """In that process: what was asked."""
    return json.loads(sys.stdin.read())


def answer(content: Any) -> None:
    """In that process: the answer, apart from whatever else is printed."""
    print(MARK + json.dumps(content))

"""Questions to a test module that answers in a process of its own, as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.conftest import ROOT
from tests.warm_start.client import ENVIRONMENT, finish, start

MARK = "ANSWER "


def ask(
    module: str, question: Any, warm: bool = True, seconds: float = 300, **environment: str
) -> Any:
    """What ``python -m module`` answers to a question; ``warm``: SGLang may be imported already."""
    script = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    process = (start if warm else subprocess.Popen)(
        [sys.executable, "-c", script],
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


def answer(found: Any) -> None:
    """In that process: the answer, apart from whatever else is printed."""
    print(MARK + json.dumps(found))

"""Questions to a test module that answers in a process of its own, as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from tests.conftest import ROOT

MARK = "ANSWER "


def ask(module: str, question: Any, **environment: str) -> Any:
    """What ``python -m module`` answers to a question on its standard input."""
    done = subprocess.run(
        [sys.executable, "-m", module],
        input=json.dumps(question),
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
        timeout=300,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
    assert lines, done.stderr[-3000:]
    return json.loads(lines[-1].removeprefix(MARK))


def question() -> Any:
    """In that process: what was asked."""
    return json.loads(sys.stdin.read())


def answer(found: Any) -> None:
    """In that process: the answer, apart from whatever else is printed."""
    print(MARK + json.dumps(found))

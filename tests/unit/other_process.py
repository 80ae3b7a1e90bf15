"""Questions to a test module that answers in a process of its own, as JSON."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from typing import Any

from tests.conftest import ROOT
from tests.warm_start.client import ENVIRONMENT, start

MARK = "ANSWER "


def ask(module: str, question: Any, warm: bool = True, **environment: str) -> Any:
    """What ``python -m module`` answers to a question on its standard input.

    Args:
        warm: SGLang's imports may be there already.
    """
    script = f"import runpy; runpy.run_module({module!r}, run_name='__main__', alter_sys=True)"
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = (start if warm else subprocess.Popen)(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=out,
            stderr=err,
            text=True,
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, **environment},
        )
        try:
            process.communicate(json.dumps(question), timeout=300)
        finally:
            process.kill()
            process.wait()
        out.seek(0)
        err.seek(0)
        lines = [line for line in out if line.startswith(MARK)]
        assert lines, err.read()[-3000:]
    return json.loads(lines[-1].removeprefix(MARK))


def question() -> Any:
    """In that process: what was asked."""
    return json.loads(sys.stdin.read())


def answer(found: Any) -> None:
    """In that process: the answer, apart from whatever else is printed."""
    print(MARK + json.dumps(found))

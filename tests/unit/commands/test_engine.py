"""What a command with an engine leaves behind: no process, no traceback, no noise."""

from __future__ import annotations

import os
import subprocess
import sys

SCRIPT = """
import multiprocessing, os, signal, sys
from unittest import mock


def noisy(ready):
    import warnings
    from tqdm import tqdm
    warnings.warn("a library's warning")
    list(tqdm(range(3)))
    ready.set()
    import time
    time.sleep(600)


class Engine:
    # What matters of sgl.Engine: spawned children, and a shutdown that kills every one of them.
    def __init__(self):
        import atexit
        context = multiprocessing.get_context("spawn")
        self.ready = context.Event()
        self.child = context.Process(target=noisy, args=(self.ready,))
        self.child.start()
        self.ready.wait()
        atexit.register(self.shutdown)

    def shutdown(self):
        import os
        from sglang.srt.entrypoints import engine
        engine.kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    # Here, for the spawned child imports all that stands above.
    import sglang
    from sglang_hyperdflash.commands.engine import quiet_engine

    with mock.patch.object(sglang, "Engine", Engine, create=True):
        with quiet_engine({}, verbose=len(sys.argv) > 1) as engine:
            child = engine.child
            if "interrupt" in sys.argv:
                try:
                    os.killpg(0, signal.SIGINT)  # as a terminal does
                    child.join(60)
                except KeyboardInterrupt:
                    child.join(2)
                    assert child.is_alive(), "the child answered the signal"
        child.join(10)
        assert child.exitcode == -9, child.exitcode
        from tqdm import tqdm
        list(tqdm([1]))
"""


def run(folder, *arguments: str) -> subprocess.CompletedProcess:
    script = folder / "script.py"
    script.write_text(SCRIPT)
    return subprocess.run(
        [sys.executable, str(script), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_an_engine_ends_without_a_traceback_or_a_word_of_other_libraries(tmp_path):
    """Found as: a KeyError of the resource tracker, which SGLang's shutdown had killed."""
    ended = run(tmp_path)
    assert ended.returncode == 0, ended.stderr
    assert "KeyError" not in ended.stderr
    assert "resource_tracker" not in ended.stderr
    assert "a library's warning" not in ended.stderr
    assert "3/3" not in ended.stderr, "bars of other processes"
    assert "1/1" in ended.stderr, "our own bar stays"


def test_ctrl_c_is_answered_once(tmp_path):
    """Found as: a traceback of every process of the engine."""
    ended = run(tmp_path, "verbose", "interrupt")
    assert ended.returncode == 0, ended.stderr
    assert "Traceback" not in ended.stderr


def test_verbose_shows_the_rest(tmp_path):
    ended = run(tmp_path, "verbose")
    assert ended.returncode == 0, ended.stderr
    assert "a library's warning" in ended.stderr
    assert "3/3" in ended.stderr

"""An ``sgl.Engine`` for a command: quiet start, complete shutdown."""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from typing import Any
from unittest import mock

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, HyperDFlashError

LOADING = "loading shards:"
# Read by every Python process of the engine when it starts.
QUIET = {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}


@contextmanager
def quiet_engine(arguments: Mapping[str, Any], *, verbose: bool) -> Iterator[Any]:
    """An engine, shut down at the end. Errors are always shown.

    Args:
        arguments: of ``sgl.Engine``. verbose: show other libraries' warnings and progress bars.
    """
    import tqdm  # noqa: F401  # before its environment is changed: our own bar stays

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not verbose:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        warnings.simplefilter("ignore")
    import sglang

    try:
        bars = contextlib.nullcontext() if verbose else _without_loading_bars()
        with _ignore_sigint(), bars:
            engine = sglang.Engine(**arguments)
    except HyperDFlashError:
        raise
    except (AssertionError, TypeError, ValueError) as error:
        raise HyperDFlashConfigError(
            f"SGLang starts no engine with these options: {error}. Check them and --engine-args."
        ) from error
    try:
        yield engine
    finally:
        atexit.unregister(engine.shutdown)  # else SGLang would shut down again at exit
        stop(engine)


@contextmanager
def _ignore_sigint() -> Iterator[None]:
    """Let processes started inside the context ignore Ctrl-C, which a terminal sends to all.

    Only this process handles it and then stops them; each would print a traceback. A spawned
    process inherits an ignored signal (``signal(7)``), so it is ignored during each start.
    """
    start = BaseProcess.start

    def start_ignoring(process: BaseProcess) -> None:
        if threading.current_thread() is not threading.main_thread():
            return start(process)
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            return start(process)
        finally:
            signal.signal(signal.SIGINT, before)

    with mock.patch.object(BaseProcess, "start", start_ignoring):
        yield


@contextmanager
def _without_loading_bars() -> Iterator[None]:
    """Filter the loader's progress bars out of standard error; everything else passes.

    SGLang's loader has no setting for them.
    """
    sys.stderr.flush()
    own = os.dup(2)
    source, sink = os.pipe()
    os.dup2(sink, 2)
    os.close(sink)
    threading.Thread(target=_pass_on, args=(source, os.dup(own)), daemon=True).start()
    try:
        yield
    finally:
        os.dup2(own, 2)
        os.close(own)


def _pass_on(source: int, to: int) -> None:
    with os.fdopen(source, errors="replace", newline="\n") as lines, os.fdopen(to, "w") as out:
        for line in lines:
            if LOADING not in line and line.strip():
                out.write(line)
                out.flush()


def stop(engine) -> None:
    """Shut down an engine, but keep this process's resource tracker alive.

    ``Engine.shutdown`` kills every child of this process. Multiprocessing's tracker is one: without
    it, this process's semaphores reach a new tracker that does not know them and prints a
    ``KeyError`` for each.
    """
    from sglang.srt.entrypoints import engine as module

    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    sparing = functools.partial(module.kill_process_tree, skip_pid=tracker)
    with mock.patch.object(module, "kill_process_tree", sparing):
        engine.shutdown()

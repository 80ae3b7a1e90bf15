"""An ``sgl.Engine`` for a command: started, as quiet as its user wants it, and stopped whole."""

from __future__ import annotations

import atexit
import functools
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any
from unittest import mock

from sglang_hyperdflash.tools.errors import HyperDFlashConfigError, HyperDFlashError

# Read by every Python process of the engine when it starts.
QUIET = {"PYTHONWARNINGS": "ignore", "TQDM_DISABLE": "1"}


@contextmanager
def quiet_engine(arguments: Mapping[str, Any], *, verbose: bool) -> Iterator[Any]:
    """An engine, shut down at the end. Its errors are always shown.

    Args:
        arguments: of ``sgl.Engine``. verbose: show other libraries' warnings and bars as well.
    """
    import tqdm  # noqa: F401  # before its environment is changed: our own bar stays

    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if not verbose:
        for name, value in QUIET.items():
            os.environ.setdefault(name, value)
        warnings.simplefilter("ignore")
    import sglang

    try:
        engine = sglang.Engine(**arguments)
    except HyperDFlashError:
        raise
    except (AssertionError, TypeError, ValueError) as error:
        raise HyperDFlashConfigError(
            f"SGLang starts no engine of these options: {error}. Check them and --engine-args."
        ) from error
    try:
        yield engine
    finally:
        atexit.unregister(engine.shutdown)  # SGLang's own second call, which would kill as below
        stop(engine)


def stop(engine) -> None:
    """Shut an engine down, and keep this process's resource tracker alive.

    ``Engine.shutdown`` kills every child of this process. The tracker of multiprocessing is one:
    without it the semaphores of this process end in a new tracker that knows none of them, which
    prints a ``KeyError`` for each.
    """
    from sglang.srt.entrypoints import engine as module

    tracker = getattr(resource_tracker._resource_tracker, "_pid", None)
    sparing = functools.partial(module.kill_process_tree, skip_pid=tracker)
    with mock.patch.object(module, "kill_process_tree", sparing):
        engine.shutdown()

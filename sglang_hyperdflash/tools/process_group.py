"""Process groups that end with the process that started them, and signals that end a command.

A parent-death signal (``prctl(PR_SET_PDEATHSIG)``) would not do: it reaches one process, fires when
the starting *thread* ends, and SGLang's own children ask for theirs after seconds of imports.
"""

import contextlib
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from subprocess import DEVNULL, PIPE, Popen
from types import FrameType
from typing import Any

# The shell reads the group's id, then waits for the end of its input, which comes when the process
# that holds the other end of the pipe ends, however it ends. What stops a whole session or cgroup
# sends SIGTERM to the shell, too.
GUARD = """trap '' HUP INT TERM
read -r group || exit 0
read -r _
kill -s KILL -- "-$group" 2>/dev/null"""
ENDING = (signal.SIGTERM, signal.SIGHUP)
REPEAT_SECONDS = 5.0


class GroupGuard:
    """Kills one process group when asked to, or when this process ends, by SIGKILL too.

    It is a shell of a few hundred KiB in its own session, which no signal to the command reaches.
    """

    def __init__(self) -> None:
        streams = {"stdin": PIPE, "stdout": DEVNULL, "stderr": DEVNULL}
        self._shell = Popen(["/bin/sh", "-c", GUARD], **streams, start_new_session=True)
        self._group: int | None = None
        _guards.add(self)

    def watch(self, group: int) -> None:
        """Take charge of a process group: the id of the process that leads it."""
        self._group = group
        self._shell.stdin.write(b"%d\n" % group)
        self._shell.stdin.flush()

    def kill(self) -> None:
        """Kill the group, or nothing if none is watched, and end the guard. Repeating is safe."""
        if self._group is not None and self._shell.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._group, signal.SIGKILL)
        self._shell.kill()
        self._shell.stdin.close()
        self._shell.wait()


_guards: weakref.WeakSet[GroupGuard] = weakref.WeakSet()


def _release_in_child() -> None:
    """Close the guards' pipes, which a forked child would keep open, and servers with them."""
    for guard in _guards:
        guard._shell.stdin.close()


os.register_at_fork(after_in_child=_release_in_child)


def _replaceable(*numbers: int) -> dict[int, Any]:
    """Return the handlers of those signals that may get another handler for a while.

    An ignored signal (``nohup``) stays ignored. Outside the main thread, where no handler runs,
    nothing changes.
    """
    if threading.current_thread() is not threading.main_thread():
        return {}
    handlers = {number: signal.getsignal(number) for number in numbers}
    return {n: handler for n, handler in handlers.items() if handler not in (None, signal.SIG_IGN)}


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Answer SIGINT, SIGTERM and SIGHUP after the block: it starts a process and takes hold of it.

    The new process ignores what is ignored here.
    """
    arrived: list[int] = []
    handlers = _replaceable(signal.SIGINT, *ENDING)
    for number in handlers:
        signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)


@contextlib.contextmanager
def sigterm_noted(note: Callable[[], None]) -> Iterator[None]:
    """Call ``note`` at the first SIGTERM, for work that chooses where it ends.

    One that comes ``REPEAT_SECONDS`` later is handled as before the block: a launcher repeats what
    a scheduler has sent to all processes.
    """
    handler, first = _replaceable(signal.SIGTERM).get(signal.SIGTERM), []

    def note_first(number: int, _frame: FrameType | None) -> None:
        if not first:
            first.append(time.monotonic())
            note()
        elif time.monotonic() - first[0] > REPEAT_SECONDS:
            signal.signal(number, handler)
            os.kill(os.getpid(), number)

    if handler is not None:
        signal.signal(signal.SIGTERM, note_first)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is note_first:
            signal.signal(signal.SIGTERM, handler)


@contextlib.contextmanager
def sigint_exits(line: str) -> Iterator[None]:
    """Let Ctrl-C end the process at once, with a line on stderr and exit code 130.

    It is for imports: libraries catch some of the exceptions that Ctrl-C otherwise raises in them.
    """

    def end(_number: int, _frame: FrameType | None) -> None:
        os.write(2, f"{line}\n".encode())
        os._exit(128 + signal.SIGINT)

    handler = _replaceable(signal.SIGINT).get(signal.SIGINT)
    if handler is not None:
        signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        if handler is not None:
            signal.signal(signal.SIGINT, handler)


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does: with its clean-up, exit code 128 + n.

    After the command a signal ends the process at once: an exception would be raised in the middle
    of Python's shutdown.
    """
    numbers = [n for n, handler in _replaceable(*ENDING).items() if handler is signal.SIG_DFL]
    for number in numbers:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, _frame: FrameType | None) -> None:
    for ending in ENDING:  # the clean-up is not interrupted
        signal.signal(ending, signal.SIG_IGN)
    raise SystemExit(128 + number)

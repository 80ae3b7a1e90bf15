"""Process groups that end with the process that started them, and signals that end a command.

A parent-death signal (``prctl(PR_SET_PDEATHSIG)``) would not do: it reaches one process, fires when
the starting *thread* ends, and SGLang's own children ask for theirs after seconds of imports.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import weakref
from collections.abc import Callable, Iterator
from types import FrameType

# Reads the group's id, then waits for the end of its input: it ends with whoever holds the other
# end, however that process ends. What stops a whole session or cgroup sends SIGTERM here, too.
GUARD = """trap '' HUP INT TERM
read -r group || exit 0
read -r _
kill -s KILL -- "-$group" 2>/dev/null"""
ENDING = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))


class GroupGuard:
    """Kills one process group when asked to, or when this process ends, by SIGKILL too.

    A shell of a few hundred KiB in a session of its own, which no signal to the command reaches.
    """

    def __init__(self) -> None:
        self._shell = subprocess.Popen(
            ["/bin/sh", "-c", GUARD],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._group: int | None = None
        _guards.add(self)

    def watch(self, group: int) -> None:
        """Take charge of a process group: the id of the process that leads it."""
        self._group = group
        self._shell.stdin.write(b"%d\n" % group)
        self._shell.stdin.flush()

    def kill(self) -> None:
        """Kill the group, or nothing if none is watched, and end the guard. Repeating is safe."""
        if self._shell.returncode is None:
            if self._group is not None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(self._group, signal.SIGKILL)
            self._shell.kill()
        self._shell.stdin.close()
        self._shell.wait()


_guards: weakref.WeakSet[GroupGuard] = weakref.WeakSet()


def _release_in_child() -> None:
    """A forked child would keep the guards' pipes open, and its parent's servers with them."""
    for guard in _guards:
        guard._shell.stdin.close()


os.register_at_fork(after_in_child=_release_in_child)


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Answer SIGINT, SIGTERM and SIGHUP after the block: it starts a process and takes hold of it.

    Does nothing outside the main thread, where no handler runs.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, *ENDING)}
    # What is ignored stays so, here and in the new process; that one does not inherit a handler.
    before = {number: old for number, old in before.items() if old not in (None, signal.SIG_IGN)}
    for number in before:
        signal.signal(number, lambda number, _: arrived.append(number))
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in arrived:
            signal.raise_signal(number)


@contextlib.contextmanager
def sigterm_noted(note: Callable[[], None]) -> Iterator[None]:
    """Call ``note`` at the first SIGTERM, for work that chooses where it ends; the next one ends it
    as before. Does nothing where SIGTERM is ignored, or outside the main thread.
    """
    before = signal.getsignal(signal.SIGTERM)
    main = threading.current_thread() is threading.main_thread()
    if not main or before in (None, signal.SIG_IGN):
        yield
        return

    def first(number: int, _frame: FrameType | None) -> None:
        signal.signal(number, before)
        note()

    signal.signal(signal.SIGTERM, first)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is first:
            signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def exit_on_signals() -> Iterator[None]:
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does: with its clean-up, exit code 128 + n.

    A signal that is ignored (``nohup``) stays ignored. After the command a signal ends the process
    at once: an exception would be raised in the middle of Python's shutdown. Outside the main
    thread, where no handler runs, nothing changes.
    """
    main = threading.current_thread() is threading.main_thread()
    ours = [n for n in ENDING if main and signal.getsignal(n) is signal.SIG_DFL]
    for number in ours:
        signal.signal(number, _exit)
    try:
        yield
    finally:
        for number in ours:
            signal.signal(number, signal.SIG_DFL)


def _exit(number: int, _frame: FrameType | None) -> None:
    for other in ENDING:  # the clean-up is not interrupted
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + number)

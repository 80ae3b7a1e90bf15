"""``python -m tests.warm_start.template FD MODULE ...``: import, then fork a child a request.

A child keeps a copy of this process as it was: what it spawns by ``multiprocessing`` is forked from
that, and sees none of its parent's hooks.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import sys
import threading
import time
import types
from collections.abc import Callable, Sequence
from multiprocessing import util

# A template's own descriptors are not lower: those are a child's.
FIRST_FD = 200
PR_SET_CHILD_SUBREAPER = 36
written: dict[str, str] = {}  # what imports put into the environment
one_at_a_time = threading.Lock()


def ask(link: socket.socket, fds: Sequence[int], **request) -> int:
    """The process id of a new child of this process."""
    prctl = ctypes.CDLL(None).prctl
    with one_at_a_time:
        prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)  # the child is an orphan of the template's
        try:
            socket.send_fds(link, [json.dumps(request).encode()], list(fds))
            return int(link.recv(32))
        finally:
            prctl(PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


def serve(link: socket.socket) -> Callable[[], None]:
    """Fork until the asker has ended; returns what the process has to do, a child's program."""
    while True:
        message, fds, _, _ = socket.recv_fds(link, 1 << 20, 64)
        if not message:
            return functools.partial(os._exit, 0)
        if (between := os.fork()) == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:
                time.sleep(0.001)
            with link:
                link.send(str(os.getpid()).encode())
            return become(fds, **json.loads(message))
        os.waitpid(between, 0)
        for fd in fds:
            os.close(fd)


def become(fds, argv, numbers, environment, session) -> Callable[[], None]:
    """In the child: what an ordinary start would have been given."""
    if session:
        os.setsid()
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        for fd in (ours.detach(), *fds):
            os.close(fd)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        return serve(theirs)
    theirs.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    util.spawnv_passfds = functools.partial(spawn, ours)
    os.closerange(3, FIRST_FD)
    for fd, number in zip(fds, numbers, strict=True):
        os.dup2(fd, number)
        os.close(fd)
    os.environ.clear()
    os.environ.update(written | environment)
    folders = filter(None, environment.get("PYTHONPATH", "").split(":"))
    sys.path[1:1] = map(os.path.abspath, folders)
    importlib.invalidate_caches()
    option, program, *sys.argv[1:] = argv[1:]
    sys.argv[0] = option
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if option == "-m":
        return functools.partial(runpy._run_module_as_main, program)
    return functools.partial(exec, compile(program, "<string>", "exec"), main.__dict__)


def spawn(link, path, args, passfds, ordinary=util.spawnv_passfds) -> int:
    """``util.spawnv_passfds`` of a child; the template has its interpreter's options, too."""
    argv = [os.fsdecode(arg) for arg in args]
    del argv[1 : 1 + len(util._args_from_interpreter_flags())]
    if "multiprocessing.spawn" not in argv[2]:
        return ordinary(path, args, passfds)
    fds = [0, 1, 2, *map(int, passfds)]
    return ask(link, fds, argv=argv, numbers=fds, environment=dict(os.environ), session=False)


def main() -> Callable[[], None]:
    given, before, devnull = int(sys.argv[1]), dict(os.environ), os.open(os.devnull, os.O_RDONLY)
    while os.dup(devnull) < FIRST_FD:
        pass
    link = socket.socket(fileno=os.dup(given))
    os.dup2(devnull, given, inheritable=False)
    import setproctitle  # SGLang brings it; who only imports this module needs none

    setproctitle.getproctitle()  # while the environment is where it finds it
    for name in sys.argv[2:]:
        module = importlib.import_module(name)
        getattr(module, "compiled", int)()  # what numba compiles
    written.update({n: v for n, v in os.environ.items() if before.get(n) != v})
    gc.collect()
    gc.freeze()  # a child's collections then copy no page of the imports
    link.send(b"ready")
    return serve(link)


if __name__ == "__main__":
    main()()  # nothing of the template is on the stack of a program

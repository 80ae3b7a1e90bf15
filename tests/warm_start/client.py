"""``start``: ``subprocess.Popen`` of a server or a command, forked from this process's template.

Whatever is not plainly the same after a fork is started in the ordinary way. What a child spawns by
``multiprocessing`` is forked from a copy of the template as it was.
"""

import ctypes
import functools
import gc
import importlib
import inspect
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Sequence
from multiprocessing import util

# The last is every model that SGLang has.
MODULES = ("sglang.srt.entrypoints.http_server", "sglang_hyperdflash.cpu.portable.mhc")
MODULES += ("sglang.srt.model_executor.model_runner", "sglang.srt.models.registry")
COMMAND = [sys.executable, "-m", "sglang_hyperdflash"]
STARTS = ([sys.executable, "-m", "sglang.launch_server"], COMMAND, [sys.executable, "-c"])
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}  # as servers of tests have
FREE = ("HYPERDFLASH_", "TEST_", "PYTEST_", "PYTHONPATH", "NO_PROXY", "no_proxy", "V4_")
FREE += ("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",)  # no import reads them
OPTIONS = {"stdin", "stdout", "stderr", "text", "env", "start_new_session"}
FIRST_FD = 200  # lower descriptors are a child's
written: dict[str, str] = {}  # what imports put into the environment
one_at_a_time = threading.Lock()


class Template:
    """A process with ``modules`` imported, from which children are forked; it ends when we do."""

    def __init__(self, *modules: str) -> None:
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.environment, fd = {**os.environ, **ENVIRONMENT}, theirs.fileno()
        command = [sys.executable, "-m", "tests.warm_start.client", str(fd), *modules]
        options = {"env": self.environment, "pass_fds": [fd], "start_new_session": True}
        with theirs:
            self.process = subprocess.Popen(command, **options)
        assert self.link.recv(32) == b"ready"

    def gives(self, options: dict) -> bool:
        """Whether a fork is what an ordinary start with these options is."""
        changed = dict(self.environment.items() ^ (options.get("env") or os.environ).items())
        return options.keys() <= OPTIONS and all(name.startswith(FREE) for name in changed)


class Forked(subprocess.Popen):
    """``subprocess.Popen`` of a process that the template forks for us."""

    def __init__(self, template: Template, command: Sequence[str], **options) -> None:
        self._template = template
        super().__init__(command, **options)

    def _execute_child(self, *given) -> None:
        asked = inspect.signature(super()._execute_child).bind(*given).arguments
        ends = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        fds = [number if end == -1 else end for number, end in enumerate(ends)]
        argv, environment = list(map(str, asked["args"])), dict(asked["env"] or os.environ)
        more = {"argv": argv, "environment": environment, "session": asked["start_new_session"]}
        self.pid = ask(self._template.link, fds, numbers=[0, 1, 2], **more)
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))


template = functools.cache(lambda: Template(*MODULES))  # this process's, of a server


def start(command: Sequence[str], **options) -> subprocess.Popen:
    """Start a server, a command of ours or a script, warm where that makes no difference."""
    import torch  # late: children of tests import this module

    allowed = os.environ.get("HYPERDFLASH_TEST_TEMPLATE") != "0"
    known = allowed and any(list(command[: len(first)]) == first for first in STARTS)
    if known and not torch.accelerator.is_available() and template().gives(options):
        return Forked(template(), command, **options)
    return subprocess.Popen(command, **options)


def start_command(*arguments: object, **options) -> subprocess.Popen:
    """``hyperdflash ARGUMENTS`` in a session of its own, with one thread as servers have."""
    options |= {"env": {**os.environ, **ENVIRONMENT}, "start_new_session": True}
    return start([*COMMAND, *map(str, arguments)], **options)


def run_command(*arguments: object, timeout: float, **options) -> subprocess.CompletedProcess[str]:
    """``hyperdflash ARGUMENTS`` to its end, as ``subprocess.run`` with text captured."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return finish(start_command(*arguments, **pipes, **options), timeout)


def finish(process: subprocess.Popen[str], timeout: float, said: str | None = None):
    """What a process of a session of its own printed to its end; ``said`` is its input."""
    try:
        out, err = process.communicate(said, timeout)
    except BaseException:  # Ctrl-C does not reach another session
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def ask(link: socket.socket, fds: Sequence[int], **request) -> int:
    """The process id of a new child of this process."""
    adopt = functools.partial(ctypes.CDLL(None).prctl, 36)  # PR_SET_CHILD_SUBREAPER
    with one_at_a_time:
        adopt(1, 0, 0, 0)  # the child is an orphan of the template's
        try:
            socket.send_fds(link, [json.dumps(request).encode()], list(fds))
            return int(link.recv(32))
        finally:
            adopt(0, 0, 0, 0)


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
                os.sched_yield()
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
    sys.path[1:1] = map(os.path.abspath, environment.get("PYTHONPATH", ".").split(":"))
    importlib.invalidate_caches()
    sys.argv[0], program, *sys.argv[1:] = argv[1:]
    sys.modules["__main__"] = main = types.ModuleType("__main__")
    if sys.argv[0] == "-m":
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
    importlib.import_module("setproctitle").getproctitle()  # it looks where the environment is now
    gc.disable()
    for name in sys.argv[2:]:
        getattr(importlib.import_module(name), "compiled", int)()  # what numba compiles
    written.update({n: v for n, v in os.environ.items() if before.get(n) != v})
    gc.collect()
    gc.enable()
    gc.freeze()  # a child's collections then copy no page of the imports
    link.send(b"ready")
    return serve(link)


if __name__ == "__main__":
    main()()  # nothing of the template is on the stack of a program

"""The template: ``python -m tests.warm_start.template FD MODULE ...``.

Imports the modules, says so over the socket ``FD`` and then forks a child for every request, until
the other end is closed. ``asking.py`` is that other end.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import gc
import importlib
import os
import runpy
import select
import signal
import socket
import sys
import threading
import types
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import process, util
from pathlib import Path

import setproctitle

from tests.warm_start.asking import Refused, ask, pair, receive, send
from tests.warm_start.environment import EnvironmentWatch, SearchPath, shadowed

# What imports keep open lies above this: the numbers below are free for what a child is given.
FIRST_OWN_FD = 100
# Begins the line of a server's log that says why a process was spawned in the ordinary way.
REFUSED = "warm start: spawned in the ordinary way:"
Job = Callable[[], None]


@dataclass
class Template:
    """What children start from.

    Attributes:
        watch: of the environment while importing. path: ``sys.path``, too.
        sessions: start time of every leader of a session that was forked, by process id.
    """

    watch: EnvironmentWatch
    path: SearchPath
    sessions: dict[int, str] = field(default_factory=dict)

    def refusal(self, request: dict) -> str | None:
        """Why a child would not be what an ordinary start gives; None if it would."""
        options = request["argv"][1:]
        if request["argv"][0] != sys.executable or options[0] not in ("-m", "-c"):
            return f"not a plain command line of {sys.executable}"
        if name := self.watch.difference(request["environment"]):
            return f"{name} was read while importing and had another value"
        if file := shadowed(self.path_for(request), sys.path, sys.modules):
            return f"{file} has the name of a module that was imported already"
        taken = set(request["numbers"]) & open_above(FIRST_OWN_FD)
        return f"descriptors {sorted(taken)} are taken" if taken else None

    def path_for(self, request: dict) -> list[str]:
        first = request["folder"] if request["argv"][1] == "-m" else ""
        return self.path.of(first, request["environment"].get("PYTHONPATH", ""))


def start_time(pid: int) -> str | None:
    """In clock ticks after boot; None when there is no such process."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return None


def open_above(lowest: int) -> set[int]:
    """Open descriptors from ``lowest`` on."""
    return {int(name) for name in os.listdir("/proc/self/fd") if int(name) >= lowest}


def import_all(modules: Sequence[str]) -> None:
    """Import, with every descriptor that stays open at a high number.

    Raises:
        RuntimeError: a module started a thread, which a fork would lose.
    """
    low = [os.open(os.devnull, os.O_RDONLY)]
    while low[-1] < FIRST_OWN_FD - 1:
        low.append(os.dup(low[0]))
    for name in modules:
        importlib.import_module(name)
    for fd in low:
        os.close(fd)
    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError(f"importing {modules} starts threads: it cannot be done beforehand")
    # A child's first collection would otherwise copy every page of the imports.
    gc.collect()
    gc.freeze()


def serve(template: Template, link: socket.socket) -> Job | None:
    """Fork children until the asker is gone; in a child, what it has to do."""
    asker = os.getppid()
    try:
        while request := next_request(link, asker):
            message, fds = request
            if reason := template.refusal(message):
                send(link, {"refused": reason})
                job = None
            else:
                job = fork_child(template, link, message, fds)
            if job is not None:
                return job
            for fd in fds:
                os.close(fd)
    except KeyboardInterrupt:
        pass
    for pid, started in template.sessions.items():
        # The asker was killed and could stop nothing.
        if start_time(pid) == started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
    return None


def next_request(link: socket.socket, asker: int) -> tuple[dict, list[int]] | None:
    """A request; None when the asker has ended, also if someone else holds its end."""
    while os.getppid() == asker:
        if select.select([link], [], [], 5)[0]:
            return receive(link)
    return None


def fork_child(
    template: Template, link: socket.socket, request: dict, fds: list[int]
) -> Job | None:
    """Fork a child of the asker, by way of a process in between that ends.

    The asker adopts orphans meanwhile. The child goes on when it has its new parent.
    """
    told, tell = os.pipe()
    wait, go = os.pipe()
    between = os.fork()
    if between == 0:
        child = os.fork()
        if child:
            os.write(tell, str(child).encode())
            os._exit(0)
        for fd in (told, tell, go):
            os.close(fd)
        os.read(wait, 1)
        os.close(wait)
        link.close()
        if os.getppid() != request["asker"]:
            os._exit(1)
        return become(template, request, fds)
    os.close(wait)
    os.waitpid(between, 0)
    pid = int(os.read(told, 32))
    if request["session"]:
        template.sessions[pid] = start_time(pid) or ""
    send(link, {"pid": pid})
    for fd in (told, tell, go):
        os.close(fd)
    return None


def become(template: Template, request: dict, fds: list[int]) -> Job:
    """In the child: everything that an ordinary start would have been given."""
    if request["session"]:
        os.setsid()
    if request["spawns"]:
        ours, theirs = pair()
        if os.fork() == 0:
            ours.close()
            for fd in fds:
                os.close(fd)
            return serve(Template(template.watch, template.path), theirs) or leave
        theirs.close()
        link, lock = socket.socket(fileno=out_of_the_way(ours.detach())), threading.Lock()
        spawn_by_asking(link, lock)
        if "sglang_hyperdflash.cli" in request["argv"]:
            start_servers_by_asking(link, lock)
    # Their numbers here may be those that others of them are to have.
    high = [out_of_the_way(fd) for fd in fds]
    for fd, number in zip(high, request["numbers"], strict=True):
        os.dup2(fd, number)
        os.close(fd)
    template.watch.apply(request["environment"])
    os.chdir(request["folder"])
    process.ORIGINAL_DIR = request["folder"]
    sys.path[:] = template.path_for(request)
    importlib.invalidate_caches()
    seed()
    _, option, program, *arguments = request["argv"]
    sys.argv, sys.orig_argv = [option, *arguments], request["argv"]
    main_module = sys.modules["__main__"] = types.ModuleType("__main__")
    if option == "-m":
        return functools.partial(runpy._run_module_as_main, program)
    return functools.partial(exec, compile(program, "<string>", "exec"), main_module.__dict__)


def out_of_the_way(fd: int) -> int:
    """The descriptor with another number, one that no program counts on."""
    new = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, FIRST_OWN_FD)
    os.close(fd)
    return new


def leave() -> None:
    """The end of a clean copy, which is no program of its own."""
    os._exit(0)


def seed() -> None:
    """New seeds, as every new process draws; ``random`` does so itself after a fork."""
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed()
    if "torch" in sys.modules:
        sys.modules["torch"].default_generator.seed()


def start_servers_by_asking(link: socket.socket, lock: threading.Lock) -> None:
    """Have ``tools.server_process`` ask the clean copy for the servers that a command starts."""
    from sglang_hyperdflash.tools.server_process import Server
    from tests.warm_start.client import start_from

    Server.__init__.__kwdefaults__["start"] = functools.partial(start_from, link, lock)


def spawn_by_asking(link: socket.socket, one_at_a_time: threading.Lock) -> None:
    """Have ``multiprocessing`` ask the clean copy for the processes that it spawns."""
    ordinary = util.spawnv_passfds

    def spawn(path, args, passfds):
        argv = [os.fsdecode(arg) for arg in args]
        # This interpreter's options are the clean copy's, too.
        del argv[1 : 1 + len(util._args_from_interpreter_flags())]
        if os.fsdecode(path) == sys.executable and "multiprocessing.spawn" in argv[2]:
            fds = {fd: fd for fd in (0, 1, 2, *map(int, passfds))}
            try:
                with one_at_a_time:
                    return ask(link, argv, fds, os.environ, os.getcwd())
            except Refused as reason:
                print(f"{REFUSED} {reason}", file=sys.stderr, flush=True)
        return ordinary(path, args, passfds)

    util.spawnv_passfds = spawn


def main() -> Job | None:
    """Import, say so, serve; in a child, what it has to do."""
    link = socket.socket(fileno=int(sys.argv[1]))
    link.set_inheritable(False)
    path = SearchPath.of_this_process()
    # It finds the memory for titles next to an environment that is not replaced yet.
    setproctitle.getproctitle()
    with EnvironmentWatch() as watch:
        import_all(sys.argv[2:])
    send(link, {"ready": os.getpid()})
    return serve(Template(watch, path.since_then()), link)


if __name__ == "__main__":
    # Here nothing is left of the template on the stack, and a program ends as it always does.
    job = main()
    if job is not None:
        job()

"""``start``: what ``subprocess.Popen`` is, with a child forked from this process's template."""

from __future__ import annotations

import atexit
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Sequence
from pathlib import Path

from tests.warm_start.asking import Refused, ask, pair, receive

SWITCH = "HYPERDFLASH_TEST_TEMPLATE"
# All that ``sglang.launch_server`` and the processes it spawns import before they load plugins, and
# what the tiny target compiles.
MODULES = ("sglang.srt.entrypoints.http_server", "sglang.srt.managers.detokenizer_manager")
MODULES += ("tests.warm_start.compiled", "tests.warm_start.hooks")
LAUNCHER = [sys.executable, "-m", "sglang.launch_server"]
# ``hyperdflash``, for its commands that start an engine.
COMMAND = [sys.executable, "-m", "sglang_hyperdflash.cli"]
# As servers of tests have.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
# What ``subprocess.Popen`` was given that a fork has no answer to, and its value when not given.
UNKNOWN = {"preexec_fn": None, "executable": None, "shell": False, "gid": None, "gids": None}
UNKNOWN |= {"uid": None, "umask": -1, "process_group": -1}


class Template:
    """A process with ``modules`` imported, and the children that are forked from it.

    Args:
        log: file for what the imports print.

    Raises:
        RuntimeError: it ended instead of getting ready.
    """

    def __init__(self, modules: Sequence[str], log: Path) -> None:
        self.link, theirs = pair()
        self.lock = threading.Lock()
        log.parent.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "tests.warm_start.template", str(theirs.fileno())]
        environment = {**os.environ, **ENVIRONMENT}
        # Another one in every test; somebody copies the whole environment while importing.
        environment.pop("PYTEST_CURRENT_TEST", None)
        with theirs, log.open("wb") as sink:
            self.process = subprocess.Popen(
                [*command, *modules],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        if receive(self.link) is None:
            self.stop()
            raise RuntimeError(f"no template ({SWITCH}=0 does without it): {log.read_text()}")

    def start(self, command: Sequence[str], spawns: bool = True, **options) -> subprocess.Popen:
        """A process as ``subprocess.Popen(command, **options)`` starts it.

        Raises:
            Refused: only an ordinary start gives what was asked for.
        """
        return _Forked(self, spawns, [str(part) for part in command], **options)

    def stop(self) -> None:
        """End the template; what was started from it stays."""
        self.link.close()
        self.process.wait(30)


class _Forked(subprocess.Popen):
    """``subprocess.Popen`` of a process that somebody else forked for us."""

    def __init__(self, template: Template, spawns: bool, command: list[str], **options) -> None:
        self._template, self._spawns = template, spawns
        super().__init__(command, **options)

    def _execute_child(self, *given) -> None:
        asked = inspect.signature(super()._execute_child).bind(*given).arguments
        if other := [name for name, value in UNKNOWN.items() if asked.get(name, value) != value]:
            raise Refused(f"subprocess.Popen was given {', '.join(other)}")
        ends = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        fds = {number: number if end == -1 else end for number, end in enumerate(ends)}
        fds |= {fd: fd for fd in asked["pass_fds"]}
        environment = os.environ if asked["env"] is None else asked["env"]
        with self._template.lock:
            self.pid = ask(
                self._template.link,
                asked["args"],
                fds,
                environment,
                os.path.abspath(asked["cwd"] or os.getcwd()),
                session=asked["start_new_session"],
                spawns=self._spawns,
            )
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))


_template: Template | None = None
_making = threading.Lock()
# Command and reason of every start that was an ordinary one after all.
ordinary_starts: list[tuple[list[str], str]] = []


def template() -> Template:
    """This process's template of a server, made when it is first asked for."""
    global _template
    with _making:
        if _template is None:
            worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
            log = Path(__file__).resolve().parents[2] / "build" / "test-logs" / worker
            _template = Template(MODULES, log / "template.log")
            atexit.register(_template.stop)
        return _template


def why_ordinary(command: Sequence[str]) -> str | None:
    """Why ``command`` is not for a template at all; None when it is."""
    if os.environ.get(SWITCH, "1") == "0":
        return f"{SWITCH}=0"
    if not sys.platform.startswith("linux"):
        return "only Linux adopts orphans"
    import torch  # late: a tester of templates needs none of it

    if torch.accelerator.is_available():
        return "an accelerator's state does not survive a fork"
    if list(command[:3]) in (LAUNCHER, COMMAND) or list(command[:2]) == [sys.executable, "-c"]:
        return None
    return f"it begins neither with {LAUNCHER} nor with {COMMAND}"


def start(command: Sequence[str], **options) -> subprocess.Popen:
    """Start a server, a command of ours or a script that asks SGLang, from the template.

    Where that would make a difference, it is started as ever, and noted in ``ordinary_starts``.
    """
    if (reason := why_ordinary(command)) is None:
        try:
            return template().start(command, **options)
        except Refused as refused:
            reason = str(refused)
    ordinary_starts.append((list(command), reason))
    return subprocess.Popen(command, **options)


def start_from(
    link: socket.socket, lock: threading.Lock, command: Sequence[str], **options
) -> subprocess.Popen:
    """As :func:`start`, in a process that was forked itself, by the clean copy at ``link``."""
    origin = types.SimpleNamespace(link=link, lock=lock)
    try:
        return _Forked(origin, True, [str(part) for part in command], **options)
    except Refused as refused:
        print(f"warm start: started in the ordinary way: {refused}", file=sys.stderr, flush=True)
    return subprocess.Popen(command, **options)


def run_command(*arguments: object, timeout: float, **options) -> subprocess.CompletedProcess[str]:
    """``hyperdflash ARGUMENTS`` to its end, as ``subprocess.run`` with text captured.

    Raises:
        subprocess.TimeoutExpired: it took longer than ``timeout`` seconds; it was killed.
    """
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = start_command(*arguments, **pipes, **options)
    return finish(process, timeout)


def finish(
    process: subprocess.Popen[str], timeout: float, said: str | None = None
) -> subprocess.CompletedProcess[str]:
    """What a process of a session of its own, with pipes, printed to its end.

    Args:
        said: its standard input.

    Raises:
        subprocess.TimeoutExpired: as of :func:`run_command`.
    """
    try:
        out, err = process.communicate(said, timeout)
    except BaseException:  # Ctrl-C does not reach another session
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def start_command(*arguments: object, **options) -> subprocess.Popen:
    """``hyperdflash ARGUMENTS`` in a session of its own, with one thread as servers have."""
    environment = {**os.environ, **ENVIRONMENT}
    command = [*COMMAND, *map(str, arguments)]
    return start(command, env=environment, start_new_session=True, **options)

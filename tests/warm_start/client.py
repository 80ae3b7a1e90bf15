"""``start``: ``subprocess.Popen`` of a server or a command, forked from this process's template."""

from __future__ import annotations

import atexit
import inspect
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from tests.warm_start.template import ask

MODULES = ("sglang.srt.entrypoints.http_server", "sglang.srt.managers.detokenizer_manager")
MODULES += ("cpu_engine.portable.mhc",)
LAUNCHER = [sys.executable, "-m", "sglang.launch_server"]
# ``hyperdflash``, for its commands that start an engine.
COMMAND = [sys.executable, "-m", "sglang_hyperdflash.cli"]
# As servers of tests have.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
# Variables that no import reads.
FREE = ("HYPERDFLASH_", "TEST_", "PYTEST_", "PYTHONPATH", "NO_PROXY", "no_proxy", "V4_")
FREE += ("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",)
OPTIONS = {"stdin", "stdout", "stderr", "text", "env", "start_new_session"}


class Template:
    """A process with ``modules`` imported, from which children are forked."""

    def __init__(self, modules: Sequence[str], log: Path) -> None:
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.lock, self.environment = threading.Lock(), {**os.environ, **ENVIRONMENT}
        command = [sys.executable, "-m", "tests.warm_start.template", str(theirs.fileno())]
        log.parent.mkdir(parents=True, exist_ok=True)
        with theirs, log.open("wb") as sink:
            self.process = subprocess.Popen(
                [*command, *modules],
                stdout=sink,
                stderr=sink,
                env=self.environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        assert self.link.recv(32) == b"ready", log.read_text()

    def gives(self, options: dict) -> bool:
        """Whether a fork is what an ordinary start with these options is."""
        asked = options.get("env") or os.environ
        names = {*asked, *self.environment}
        changed = [name for name in names if asked.get(name) != self.environment.get(name)]
        return options.keys() <= OPTIONS and all(name.startswith(FREE) for name in changed)

    def stop(self) -> None:
        """End the template; what was started from it stays."""
        self.link.close()
        self.process.wait()


class Forked(subprocess.Popen):
    """``subprocess.Popen`` of a process that the template forks for us."""

    def __init__(self, template: Template, command: Sequence[str], **options) -> None:
        self._template = template
        super().__init__([str(part) for part in command], **options)

    def _execute_child(self, *given) -> None:
        asked = inspect.signature(super()._execute_child).bind(*given).arguments
        ends = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        with self._template.lock:
            self.pid = ask(
                self._template.link,
                [number if end == -1 else end for number, end in enumerate(ends)],
                argv=asked["args"],
                numbers=[0, 1, 2],
                environment=dict(asked["env"] or os.environ),
                session=asked["start_new_session"],
            )
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))


_templates: list[Template] = []
_making = threading.Lock()


def template() -> Template:
    """This process's template of a server, made when it is first asked for."""
    with _making:
        if not _templates:
            worker = os.environ.get("PYTEST_XDIST_WORKER", "main")
            log = Path(__file__).resolve().parents[2] / "build" / "test-logs" / worker
            _templates.append(Template(MODULES, log / "template.log"))
            atexit.register(_templates[0].stop)
        return _templates[0]


def start(command: Sequence[str], **options) -> subprocess.Popen:
    """Start a server, a command of ours or a script, warm where that makes no difference."""
    import torch  # late: commands without it import this

    known = list(command[:3]) in (LAUNCHER, COMMAND) or list(command[:2]) == [sys.executable, "-c"]
    if os.environ.get("HYPERDFLASH_TEST_TEMPLATE") == "0" or torch.accelerator.is_available():
        known = False
    if known and template().gives(options):
        return Forked(template(), command, **options)
    return subprocess.Popen(command, **options)


def start_command(*arguments: object, **options) -> subprocess.Popen:
    """``hyperdflash ARGUMENTS`` in a session of its own, with one thread as servers have."""
    environment = {**os.environ, **ENVIRONMENT}
    command = [*COMMAND, *map(str, arguments)]
    return start(command, env=environment, start_new_session=True, **options)


def run_command(*arguments: object, timeout: float, **options) -> subprocess.CompletedProcess[str]:
    """``hyperdflash ARGUMENTS`` to its end, as ``subprocess.run`` with text captured."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return finish(start_command(*arguments, **pipes, **options), timeout)


def finish(
    process: subprocess.Popen[str], timeout: float, said: str | None = None
) -> subprocess.CompletedProcess[str]:
    """What a process of a session of its own printed to its end; ``said`` is its input."""
    try:
        out, err = process.communicate(said, timeout)
    except BaseException:  # Ctrl-C does not reach another session
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        raise
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)

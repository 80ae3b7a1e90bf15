"""``start``: ``subprocess.Popen`` of a server or a command, forked from this process's template.

Whatever is not plainly the same after a fork is started in the ordinary way.
"""

from __future__ import annotations

import functools
import inspect
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence

from tests.warm_start.template import ask

MODULES = ("sglang.srt.entrypoints.http_server", "sglang.srt.managers.detokenizer_manager")
MODULES += ("cpu_engine.portable.mhc",)
LAUNCHER = [sys.executable, "-m", "sglang.launch_server"]
COMMAND = [sys.executable, "-m", "sglang_hyperdflash.cli"]
# As servers of tests have.
ENVIRONMENT = {"OMP_NUM_THREADS": "1"}
# Variables that no import reads.
FREE = ("HYPERDFLASH_", "TEST_", "PYTEST_", "PYTHONPATH", "NO_PROXY", "no_proxy", "V4_")
FREE += ("SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION",)
OPTIONS = {"stdin", "stdout", "stderr", "text", "env", "start_new_session"}


class Template:
    """A process with ``modules`` imported, from which children are forked; it ends when we do."""

    def __init__(self, *modules: str) -> None:
        self.link, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.environment, fd = {**os.environ, **ENVIRONMENT}, theirs.fileno()
        command = [sys.executable, "-m", "tests.warm_start.template", str(fd), *modules]
        options = {"env": self.environment, "pass_fds": [fd], "start_new_session": True}
        with theirs:
            self.process = subprocess.Popen(command, **options)
        assert self.link.recv(32) == b"ready"

    def gives(self, options: dict) -> bool:
        """Whether a fork is what an ordinary start with these options is."""
        asked = options.get("env") or os.environ
        changed = {name for name, _ in self.environment.items() ^ asked.items()}
        return options.keys() <= OPTIONS and all(name.startswith(FREE) for name in changed)


class Forked(subprocess.Popen):
    """``subprocess.Popen`` of a process that the template forks for us."""

    def __init__(self, template: Template, command: Sequence[str], **options) -> None:
        self._template = template
        super().__init__(command, **options)

    def _execute_child(self, *given) -> None:
        asked = inspect.signature(super()._execute_child).bind(*given).arguments
        ends = [asked[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        self.pid = ask(
            self._template.link,
            [number if end == -1 else end for number, end in enumerate(ends)],
            argv=[str(part) for part in asked["args"]],
            numbers=[0, 1, 2],
            environment=dict(asked["env"] or os.environ),
            session=asked["start_new_session"],
        )
        self._child_created = True
        pipes = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*(asked[name] for name in pipes))


@functools.cache
def template() -> Template:
    """This process's template of a server."""
    return Template(*MODULES)


def start(command: Sequence[str], **options) -> subprocess.Popen:
    """Start a server, a command of ours or a script, warm where that makes no difference."""
    import torch  # late: children of tests import this module

    known = list(command[:3]) in (LAUNCHER, COMMAND) or list(command[:2]) == [sys.executable, "-c"]
    if os.environ.get("HYPERDFLASH_TEST_TEMPLATE") == "0" or torch.accelerator.is_available():
        known = False
    if known and template().gives(options):
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

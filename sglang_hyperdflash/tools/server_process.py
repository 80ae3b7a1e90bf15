"""Start and stop real SGLang servers as child processes, for the demo, tools and tests."""

import argparse
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, suppress
from pathlib import Path
from typing import Self

import requests

from sglang_hyperdflash import CPU_PLATFORM
from sglang_hyperdflash.tools.errors import ServerFailed
from sglang_hyperdflash.tools.process_group import GroupGuard, signals_deferred

# Below Linux's range for outgoing connections, which could take the port meanwhile.
SERVER_PORTS = range(20000, 32000)
API_KEY = "HYPERDFLASH_API_KEY"
# Seconds between two words about a server that starts: on a terminal, in one line, and elsewhere.
ON_TERMINAL, ELSEWHERE = 1.0, 15.0


def free_port() -> int:
    """Return a random unused port on loopback."""
    while True:
        port = random.SystemRandom().choice(SERVER_PORTS)
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port


def reason_of(text: str) -> str:
    """Return what the body of a server's refusal says, without the JSON around it."""
    try:
        reason = json.loads(text)
    except ValueError:
        return text[:300]
    if isinstance(reason, dict):
        reason = reason.get("error", reason)
    if isinstance(reason, dict):
        reason = reason.get("message") or reason.get("detail") or reason
    return str(reason)


def key_headers() -> dict[str, str]:
    """Return the headers of every request to a server, which may want a key."""
    return {"Authorization": f"Bearer {os.environ[API_KEY]}"} if os.environ.get(API_KEY) else {}


class _KeyOption(argparse.Action):
    def __call__(self, parser, namespace, key, option=None) -> None:
        if key:
            os.environ[API_KEY] = key


def add_key_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--api-key``, which :func:`key_headers` of this process follow from then on."""
    text = f"key of the servers' API (default: the variable {API_KEY})"
    parser.add_argument("--api-key", action=_KeyOption, help=text)


class Server(AbstractContextManager):
    """``python -m sglang.launch_server`` on loopback; a context manager.

    It leads a process group that ends with this process, however this one ends.

    Args:
        model: target folder or hub id.
        args: further command-line arguments.
        log: file that receives the server's output, after what earlier servers wrote there; None:
            this process's standard error.
        launcher: the launch command; ``("sglang", "serve")`` is the alternative.
        threads: OpenMP threads of the server's processes (CPU); None leaves the environment.
        environment: its own variables. Without an accelerator it runs on the CPU platform.
        port: its port; None for any free one.
        start: starts the process, called as ``subprocess.Popen`` is. Tests start many servers and
            fork them from a process that has done the imports.
    """

    def __init__(
        self,
        model: str | Path,
        *args: str,
        log: Path | None,
        launcher: tuple[str, ...] = (sys.executable, "-m", "sglang.launch_server"),
        threads: int | None = 1,
        environment: dict[str, str] | None = None,
        port: int | None = None,
        start: Callable[..., subprocess.Popen] = subprocess.Popen,
    ) -> None:
        self.port = free_port() if port is None else port
        self.url = f"http://127.0.0.1:{self.port}"
        self.log, self._begun = log, time.monotonic()
        self.command = [*launcher, "--model-path", str(model)]
        self.command += ["--host", "127.0.0.1", "--port", str(self.port), *map(str, args)]
        # No proxy for loopback, here and in the server's own warm-up.
        for name in ("no_proxy", "NO_PROXY"):
            hosts = os.environ.get(name, "")
            if "127.0.0.1" not in hosts.split(","):
                os.environ[name] = ",".join(filter(None, [hosts, "127.0.0.1", "localhost"]))
        env = {CPU_PLATFORM: "1", **os.environ, **(environment or {})}
        if threads is not None:
            env["OMP_NUM_THREADS"] = str(threads)
        with ExitStack() as stack:
            sink, self._log_start = sys.stderr, 0
            if log is not None:
                log.parent.mkdir(parents=True, exist_ok=True)
                sink = stack.enter_context(log.open("ab"))
                self._log_start = sink.tell()
            stack.enter_context(signals_deferred())
            self._guard = GroupGuard()
            try:
                self.process = start(
                    self.command, stdout=sink, stderr=sink, env=env, start_new_session=True
                )
                self._guard.watch(self.process.pid)
            except BaseException:
                self._guard.kill()
                raise

    def wait(self, timeout: float = 300.0) -> Self:
        """Block until ``/health`` answers; raise ``ServerFailed`` with the log's end.

        If the log is a file, standard error says meanwhile what starts, and since when.
        """
        terminal = sys.stderr.isatty()
        try:
            return self._wait(timeout, terminal)
        finally:
            if terminal and self.log:
                print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _wait(self, timeout: float, terminal: bool) -> Self:
        deadline, said = time.monotonic() + timeout, self._begun
        pause, begin, end = (ON_TERMINAL, "\r", "") if terminal else (ELSEWHERE, "", "\n")
        while time.monotonic() < deadline:
            if self.process.poll() is not None:
                raise ServerFailed(
                    f"server exited with code {self.process.returncode}:\n{self.log_tail()}"
                )
            with suppress(requests.RequestException):
                if requests.get(f"{self.url}/health", timeout=5).status_code == 200:
                    return self
            now = time.monotonic()
            if self.log and now - said >= pause:
                line = f"{begin}starting {self.log.stem} ... {now - self._begun:.0f} s"
                print(line, end=end, file=sys.stderr, flush=True)
                said = now
            time.sleep(0.5)
        self.stop()
        raise ServerFailed(f"server not ready after {timeout:.0f} s:\n{self.log_tail()}")

    def log_tail(self, lines: int = 30) -> str:
        """Return the last lines of this server's log."""
        content = self.log.read_bytes() if self.log and self.log.is_file() else b""
        text = content[self._log_start :].decode(errors="replace")
        return "\n".join(text.splitlines()[-lines:])

    def generate(self, timeout: float = 600.0, **payload):
        """POST ``/generate`` (SGLang's native API) and return its JSON; raise on HTTP errors."""
        reply = requests.post(f"{self.url}/generate", json=payload, timeout=timeout)
        reply.raise_for_status()
        return reply.json()

    def stop(self, patience: float = 3.0) -> None:
        """End the server and every process it started, by force after ``patience`` seconds."""
        try:
            if patience and self.process.poll() is None:
                self.process.terminate()
                with suppress(subprocess.TimeoutExpired):
                    self.process.wait(patience)
        finally:  # children that ignored the signal outlive the server
            self._guard.kill()
            self.process.kill()
            self.process.wait()

    def __exit__(self, *exception) -> None:
        self.stop()


def comparable_arguments(tokens: int = 16384, log_level: str = "warning") -> tuple[str, ...]:
    """Return arguments of a tiny server whose answers are compared, in its target's own dtype.

    ``tokens`` is the number of K/V slots.
    """
    return ("--max-total-tokens", str(tokens), "--sleep-on-idle", "--log-level", log_level)


def hyperdflash_arguments(draft: str | Path) -> tuple[str, ...]:
    """Return the command-line arguments that turn HYPERDFLASH on."""
    algorithm = ("--speculative-algorithm", "HYPERDFLASH")
    return (*algorithm, "--speculative-draft-model-path", str(draft))

"""Runs a command, injects a fault, and runs it again until it ends well."""

import os
import re
import shutil
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import psutil

from tests.waiting import until
from tests.warm_start import client

SECONDS = 600.0
COMMAND = tuple(client.COMMAND)


class Subject:
    """A long command and how to see what it does; ``folder`` receives all the files of one run.

    Every kind has ``arguments(folder)``; ``result(folder)``, what must be equal after any fault;
    ``data(folder)``, a file to flip a byte in; and ``kill_helper(process)``, if it has a child that
    it depends on.

    Attributes:
        shared: what :func:`subjects.prepare` made. units: how many it works through.
        lines: in the folder, a file of JSON lines to tear. hashed: whether every flipped byte of
            ``data`` is noticed; else one unit may differ.
        launcher: what runs it. start: starts the process. ends: its status after a good end.
    """

    units: int
    lines: str
    hashed = True
    launcher = COMMAND
    start = staticmethod(subprocess.Popen)
    ends = 0

    def __init__(self, shared: Path) -> None:
        self.shared = shared

    def done(self, folder: Path) -> int:
        """Units on disk."""
        path = folder / self.lines
        return path.read_bytes().count(b"\n") if path.is_file() else 0


class Runs:
    """The runs of one subject into one new folder; ``said``: what the last one said on stderr."""

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.subject, self.folder, self.said = subject, folder, ""
        self.heard: dict[int, Future[bytes]] = {}
        folder.mkdir(parents=True)

    def start(self) -> subprocess.Popen:
        command = [*self.subject.launcher, *self.subject.arguments(self.folder)]
        # A pipe: a log file could not grow on a full disk.
        pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
        process = self.subject.start(command, **pipes, start_new_session=True)
        self.heard[process.pid] = ThreadPoolExecutor(1).submit(process.stderr.read)
        return process

    def end(self, process: subprocess.Popen, *, killed: bool = False) -> int:
        """Wait; without being killed it prints no traceback. No process of its group is left."""
        try:
            code = process.wait(SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        self.said = self.heard.pop(process.pid).result(SECONDS).decode(errors="replace")
        # A launcher (torchrun) prints its own; frames of ours may not be in them.
        ours = r'File "[^"]*/sglang_hyperdflash/' if self.subject.launcher != COMMAND else ""
        _, *tracebacks = self.said.split("Traceback (most recent call last)")
        assert killed or not any(re.search(ours, each) for each in tracebacks), self.said
        return 0 if code == self.subject.ends else code

    def has(self, share: float) -> bool:
        """This share of the units is on disk."""
        begun = any(self.folder.glob("**/*.hyperdflash.json"))
        return begun and self.subject.done(self.folder) >= round(share * self.subject.units)

    def started(self, share: float) -> subprocess.Popen:
        """A run that has a share of the units, or has ended before."""
        process, nap = self.start(), partial(time.sleep, 0.005)
        until(lambda: self.has(share) or process.poll() is not None, meanwhile=nap)
        return process

    def finish(self) -> list:
        """Run until the command ends well, doing what its errors advise; returns the result."""
        for _ in range(3):
            if self.end(self.start()) == 0:
                return self.subject.result(self.folder)
            # A launcher has the last word.
            advice = [line for line in self.said.splitlines() if "emove " in line]
            assert advice, self.said[-2000:]
            self.follow(advice[-1])
        raise AssertionError(f"does not end: {self.said[-2000:]}")

    def follow(self, advice: str) -> None:
        """Remove the file or line that an error names."""
        if named := re.search(r": (\S+):(\d+): .* remove this line", advice):
            place, number = Path(named[1]), int(named[2])
            assert self.folder in place.parents, advice
            lines = place.read_bytes().splitlines(keepends=True)
            place.write_bytes(b"".join(lines[: number - 1] + lines[number:]))
        else:
            name = re.search(r"emove (\S+) and run", advice)[1]
            place = Path(advice.split(": ")[1].split(" is damaged")[0] if name == "it" else name)
            assert self.folder in place.parents, advice
            shutil.rmtree(place) if place.is_dir() else place.unlink()


def everyone(process: subprocess.Popen) -> list[psutil.Process]:
    """A command and all that it started; a launcher's processes have groups of their own."""
    with suppress(psutil.NoSuchProcess):
        parent = psutil.Process(process.pid)
        return [parent, *parent.children(recursive=True)]
    return []


def to_all(process: subprocess.Popen, number: int) -> None:
    for each in everyone(process):
        with suppress(psutil.NoSuchProcess):
            each.send_signal(number)


def kill(runs: Runs, share: float) -> None:
    process = runs.started(share)
    to_all(process, signal.SIGKILL)
    runs.end(process, killed=True)


def interrupt(runs: Runs) -> None:
    """As a terminal does: every process of the command's group gets the signal."""
    process = runs.started(0.5)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    runs.end(process)


def fill_disk(runs: Runs) -> None:
    """From half way on, no file of the command's own processes can grow.

    Not those of SGLang: they keep shared memory in files, too.
    """
    process = runs.started(0.5)
    if runs.has(0.5):
        for each in everyone(process)[: None if runs.subject.launcher != COMMAND else 1]:
            with suppress(psutil.NoSuchProcess):
                each.rlimit(psutil.RLIMIT_FSIZE, (64, 64))
    if runs.end(process):  # 0: it was through before
        assert "cannot write" in runs.said, runs.said


def kill_helper(runs: Runs) -> None:
    process = runs.started(0.5)
    runs.subject.kill_helper(process)
    runs.end(process)


def second_run(runs: Runs) -> None:
    """The first stands still meanwhile, so that it cannot end before the second begins."""
    process = runs.started(0.25)
    assert runs.has(0.25)
    to_all(process, signal.SIGSTOP)
    try:
        code = runs.end(runs.start())
    finally:
        to_all(process, signal.SIGCONT)
    assert code != 0 and "in use by process" in runs.said, runs.said
    assert runs.end(process) == 0


def tear_line(runs: Runs) -> None:
    kill(runs, 0.5)
    with (runs.folder / runs.subject.lines).open("ab") as file:
        file.write(b'{"index": 1, "dig')


def flip_byte(runs: Runs) -> None:
    kill(runs, 0.75)
    path = runs.subject.data(runs.folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(bytes(content))


SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
FAULTS: dict[str, Callable[[Runs], None]] = {
    **{f"kill -9 at {share:.0%}": partial(kill, share=share) for share in SHARES},
    "Ctrl-C": interrupt,
    "disk full": fill_disk,
    "helper dies": kill_helper,
    "second run": second_run,
    "torn last line": tear_line,
    "flipped byte": flip_byte,
}


def different(expected: list, result: list) -> int:
    """Units that are lost, or those that are new, whichever are more."""
    wanted, got = Counter(map(repr, expected)), Counter(map(repr, result))
    return max((wanted - got).total(), (got - wanted).total())

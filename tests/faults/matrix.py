"""Runs a command, injects a fault, and runs it again until it ends well."""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.warm_start import client

SECONDS = 600.0
COMMAND = tuple(client.COMMAND)
EVAL = (sys.executable, "-m", "eval")


@dataclass(frozen=True)
class Subject:
    """A long command and how to see what it does.

    Attributes:
        arguments: of ``hyperdflash``, for a folder that receives all its files.
        units: how many units it works through. result: what must be equal after any fault.
        data: a file to flip a byte in. hashed: whether every flipped byte of it is noticed; else
            one unit may differ. lines: in the folder, a file of JSON lines to tear, if any.
        on_disk: how many units are; without it, the lines of that file.
        launcher: what runs the arguments. start: starts the process.
        kill_helper: ends what the command depends on (a server, a child), or None without any.
        restore_helper: brings it back.
    """

    arguments: Callable[[Path], list[str]]
    units: int
    result: Callable[[Path], list]
    data: Callable[[Path], Path]
    lines: str = ""
    on_disk: Callable[[Path], int] | None = None
    hashed: bool = True
    launcher: tuple[str, ...] = COMMAND
    start: Callable[..., subprocess.Popen] = subprocess.Popen
    kill_helper: Callable[[subprocess.Popen], None] | None = None
    restore_helper: Callable[[], None] = lambda: None

    @property
    def launched(self) -> bool:
        """By a launcher with processes of its own."""
        return self.launcher not in (COMMAND, EVAL)

    def done(self, folder: Path) -> int:
        """Units on disk."""
        if self.on_disk is not None:
            return self.on_disk(folder)
        path = folder / self.lines
        return path.read_bytes().count(b"\n") if path.is_file() else 0


class Runs:
    """The runs of one subject into one new folder; ``said``: what the last one said on stderr.

    That is read from a pipe: a log file could not grow on a full disk.
    """

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.subject, self.folder, self.said = subject, folder, ""
        self.heard: dict[int, tuple[threading.Thread, list[bytes]]] = {}
        folder.mkdir(parents=True)

    def start(self) -> subprocess.Popen:
        command = [*self.subject.launcher, *self.subject.arguments(self.folder)]
        process = self.subject.start(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
        )
        said: list[bytes] = []
        listen = threading.Thread(target=lambda: said.append(process.stderr.read()), daemon=True)
        listen.start()
        self.heard[process.pid] = (listen, said)
        return process

    def end(self, process: subprocess.Popen, *, killed: bool = False) -> int:
        """Wait; without being killed it prints no traceback. No process of its group is left."""
        try:
            code = process.wait(SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        listen, said = self.heard.pop(process.pid)
        listen.join(SECONDS)
        self.said = b"".join(said).decode(errors="replace")
        # A launcher (torchrun) prints its own; frames of ours may not be in them.
        ours = r'File "[^"]*/(sglang_hyperdflash|eval)/' if self.subject.launched else ""
        _, *tracebacks = self.said.split("Traceback (most recent call last)")
        assert killed or not any(re.search(ours, each) for each in tracebacks), self.said
        return code

    def until(self, process: subprocess.Popen, share: float) -> bool:
        """Wait for a share of the units; False when the command ended before."""
        wanted, deadline = round(share * self.subject.units), time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            begun = any(self.folder.glob("**/*.hyperdflash.json"))
            if begun and self.subject.done(self.folder) >= wanted:
                return True
            if process.poll() is not None:
                return False
            time.sleep(0.005)
        raise AssertionError(f"no {wanted} units after {SECONDS:.0f} s")

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
            lines = place.read_bytes().splitlines(keepends=True)
            place.write_bytes(b"".join(lines[: number - 1] + lines[number:]))
        else:
            name = re.search(r"emove (\S+) and run", advice)[1]
            place = Path(advice.split(": ")[1].split(" is damaged")[0] if name == "it" else name)
            shutil.rmtree(place) if place.is_dir() else place.unlink()
        assert self.folder in place.parents, advice


def everyone(process: subprocess.Popen) -> list[int]:
    """Ids of a command and all that it started; a launcher's processes have groups of their own."""
    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        return [process.pid, *(child.pid for child in children)]
    return [process.pid]


def to_all(process: subprocess.Popen, number: int) -> None:
    for each in everyone(process):
        with suppress(ProcessLookupError):
            os.kill(each, number)


def kill(runs: Runs, share: float) -> None:
    process = runs.start()
    runs.until(process, share)
    to_all(process, signal.SIGKILL)
    runs.end(process, killed=True)


def interrupt(runs: Runs) -> None:
    """As a terminal does: every process of the command's group gets the signal."""
    process = runs.start()
    runs.until(process, 0.5)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGINT)
    runs.end(process)


def fill_disk(runs: Runs) -> None:
    """From half way on, no file of the command's own processes can grow.

    Not those of SGLang: they keep shared memory in files, too.
    """
    process = runs.start()
    if runs.until(process, 0.5):
        for each in everyone(process) if runs.subject.launched else [process.pid]:
            with suppress(ProcessLookupError):
                resource.prlimit(each, resource.RLIMIT_FSIZE, (64, 64))
    if runs.end(process):  # 0: it was through before
        assert "cannot write" in runs.said, runs.said


def kill_helper(runs: Runs) -> None:
    process = runs.start()
    runs.until(process, 0.5)
    runs.subject.kill_helper(process)
    runs.end(process)
    runs.subject.restore_helper()


def second_run(runs: Runs) -> None:
    """The first stands still meanwhile, so that it cannot end before the second begins."""
    process = runs.start()
    assert runs.until(process, 0.25)
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


FAULTS: dict[str, Callable[[Runs], None]] = {
    **{
        f"kill -9 at {share:.0%}": lambda runs, share=share: kill(runs, share)
        for share in (0.0, 0.25, 0.5, 0.75, 1.0)
    },
    "Ctrl-C": interrupt,
    "disk full": fill_disk,
    "helper dies": kill_helper,
    "second run": second_run,
    "torn last line": tear_line,
    "flipped byte": flip_byte,
}


def different(expected: list, result: list) -> int:
    """Units that are lost, or those that are new, whichever are more."""
    rest, lost = list(result), 0
    for unit in expected:
        if unit in rest:
            rest.remove(unit)
        else:
            lost += 1
    return max(lost, len(rest))

"""Runs a command, injects a fault, runs it again, and compares with an undisturbed run."""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from tests.warm_start import client

POINTS = (0.0, 0.25, 0.5, 0.75, 1.0)
SECONDS = 600.0
COMMAND = tuple(client.COMMAND)
EVAL = (sys.executable, "-m", "eval")


@dataclass(frozen=True)
class Subject:
    """A long command and how to see what it does.

    Attributes:
        arguments: of ``hyperdflash``, for a folder that receives all its files.
        units: how many units it works through. done: how many are on disk, in that folder.
        result: what must be equal after any fault. lines: a file of JSON lines to tear, or None.
        data: a file to flip a byte in. hashed: whether every flipped byte of it is noticed; else
            one unit may differ. launcher: what runs the arguments. start: starts the process.
        kill_helper: ends what the command depends on (a server, a child), or None without any.
        restore_helper: brings it back.
    """

    name: str
    arguments: Callable[[Path], list[str]]
    units: int
    done: Callable[[Path], int]
    result: Callable[[Path], Any]
    lines: Callable[[Path], Path] | None
    data: Callable[[Path], Path]
    hashed: bool = True
    launcher: tuple[str, ...] = COMMAND
    start: Callable[..., subprocess.Popen] = subprocess.Popen
    kill_helper: Callable[[subprocess.Popen], None] | None = None
    restore_helper: Callable[[], None] = lambda: None


@dataclass
class Cell:
    """One fault's outcome.

    Attributes:
        tolerated: units that may be lost and doubled. said: all that was printed on stderr.
    """

    subject: str
    fault: str
    seconds: float = 0.0
    lost: int = 0
    doubled: int = 0
    tracebacks: int = 0
    tolerated: int = 0
    said: list[str] = field(default_factory=list)

    @property
    def good(self) -> bool:
        return max(self.lost, self.doubled) <= self.tolerated and not self.tracebacks


class Runs:
    """The runs of one subject into one folder.

    What a run says on stderr is read from a pipe: a log file could not grow on a full disk, and
    would hide what the command says of it.
    """

    def __init__(self, subject: Subject, folder: Path, cell: Cell) -> None:
        self.subject, self.folder, self.cell = subject, folder, cell
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
        """Wait, and keep what it said. No process of its group is left behind."""
        try:
            code = process.wait(SECONDS)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
        listen, said = self.heard.pop(process.pid)
        listen.join(SECONDS)
        text = b"".join(said).decode(errors="replace")
        self.cell.said.append(text)
        if not killed:
            self.cell.tracebacks += tracebacks(text, self.subject.launcher)
        return code

    def until(self, process: subprocess.Popen, share: float) -> bool:
        """Wait for a share of the units; False when the command ended before."""
        wanted = round(share * self.subject.units)
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            begun = any(self.folder.glob("**/*.hyperdflash.json"))
            if begun and self.subject.done(self.folder) >= wanted:
                return True
            if process.poll() is not None:
                return False
            time.sleep(0.005)
        raise AssertionError(f"{self.subject.name}: no {wanted} units after {SECONDS:.0f} s")

    def finish(self) -> None:
        """Run until the command ends well; remove the file or line that it says to remove."""
        for _ in range(3):
            code = self.end(self.start())
            if code == 0:
                return
            # A launcher (torchrun) has the last word.
            advice = [line for line in self.cell.said[-1].splitlines() if "emove " in line]
            assert advice, f"exit {code}: {self.cell.said[-1][-2000:]}"
            self.follow(advice[-1])
        raise AssertionError(f"{self.subject.name} does not end: {self.cell.said[-1][-2000:]}")

    def follow(self, advice: str) -> None:
        """Do what an error says to do."""
        if found := re.search(r": (\S+):(\d+): .* remove this line", advice):
            place, number = Path(found[1]), int(found[2])
            lines = place.read_bytes().splitlines(keepends=True)
            place.write_bytes(b"".join(lines[: number - 1] + lines[number:]))
        else:
            named = re.search(r"emove (\S+) and run", advice)[1]
            place = Path(advice.split(": ")[1].split(" is damaged")[0] if named == "it" else named)
            shutil.rmtree(place) if place.is_dir() else place.unlink()
        assert self.folder in place.parents, advice


def tracebacks(said: str, launcher: tuple[str, ...]) -> int:
    """How many a command printed; of another launcher's (torchrun's) those with frames of ours."""
    blocks = said.split("Traceback (most recent call last)")[1:]
    if launcher in (COMMAND, EVAL):
        return len(blocks)
    return sum(re.search(r'File "[^"]*/(sglang_hyperdflash|eval)/', b) is not None for b in blocks)


def signal_all(process: subprocess.Popen, number: int) -> None:
    """To a command and all that it started; a launcher's processes have groups of their own."""
    for each in (process.pid, *descendants(process)):
        with suppress(ProcessLookupError):
            os.kill(each, number)


def descendants(process: subprocess.Popen) -> list[int]:
    """Ids of all processes that a command started."""
    with suppress(psutil.NoSuchProcess):
        return [child.pid for child in psutil.Process(process.pid).children(recursive=True)]
    return []


def kill_at(share: float):
    def hurt(runs: Runs) -> None:
        process = runs.start()
        runs.until(process, share)
        signal_all(process, signal.SIGKILL)
        runs.end(process, killed=True)

    return hurt


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
        launched = runs.subject.launcher not in (COMMAND, EVAL)
        for each in (process.pid, *(descendants(process) if launched else ())):
            with suppress(ProcessLookupError):
                resource.prlimit(each, resource.RLIMIT_FSIZE, (64, 64))
    if runs.end(process):  # 0: it was through before
        assert "cannot write" in runs.cell.said[-1], runs.cell.said[-1]


def kill_helper(runs: Runs) -> None:
    process = runs.start()
    runs.until(process, 0.5)
    runs.subject.kill_helper(process)
    runs.end(process)
    runs.subject.restore_helper()


def second_run(runs: Runs) -> None:
    """The first stands still meanwhile, so that it cannot end before the second begins."""
    process = runs.start()
    assert runs.until(process, 0.25), runs.subject.name
    signal_all(process, signal.SIGSTOP)
    try:
        code = runs.end(runs.start())
    finally:
        signal_all(process, signal.SIGCONT)
    assert code != 0, "a second run was let in"
    assert "in use by process" in runs.cell.said[-1], runs.cell.said[-1]
    assert runs.end(process) == 0


def tear_line(runs: Runs) -> None:
    kill_at(0.5)(runs)
    with runs.subject.lines(runs.folder).open("ab") as file:
        file.write(b'{"index": 1, "dig')


def flip_byte(runs: Runs) -> None:
    kill_at(0.75)(runs)
    path = runs.subject.data(runs.folder)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0x10
    path.write_bytes(bytes(content))


FAULTS: dict[str, Callable[[Runs], None]] = {
    **{f"kill -9 at {share:.0%}": kill_at(share) for share in POINTS},
    "Ctrl-C": interrupt,
    "disk full": fill_disk,
    "helper dies": kill_helper,
    "second run": second_run,
    "torn last line": tear_line,
    "flipped byte": flip_byte,
}


def compared(expected: Any, found: Any) -> tuple[int, int]:
    """``(lost, doubled)`` units; a result that is no list counts as one unit."""
    if not isinstance(expected, list):
        return int(found != expected), 0
    rest = list(found)
    lost = 0
    for unit in expected:
        if unit in rest:
            rest.remove(unit)
        else:
            lost += 1
    return lost, len(rest)


def run_cell(subject: Subject, fault: str, root: Path, expected: Any) -> Cell:
    """Inject the fault, run again, compare."""
    tolerated = int(fault == "flipped byte" and not subject.hashed)
    cell = Cell(subject.name, fault, tolerated=tolerated)
    started = time.monotonic()
    runs = Runs(subject, root / f"{subject.name} {fault}".replace(" ", "-").replace("%", ""), cell)
    FAULTS[fault](runs)
    runs.finish()
    cell.lost, cell.doubled = compared(expected, subject.result(runs.folder))
    cell.seconds = time.monotonic() - started
    return cell


def undisturbed(subject: Subject, root: Path) -> Any:
    """The result of an undisturbed run."""
    runs = Runs(subject, root / f"{subject.name}-undisturbed", Cell(subject.name, "none"))
    runs.finish()
    return subject.result(runs.folder)


def table(cells: list[Cell]) -> str:
    """The matrix as text: a line for each command and fault, and the totals."""
    names = ("lost", "doubled", "tracebacks", "s")
    lines = [f"{'command':<20}{'fault':<16}" + "".join(f"{name:>11}" for name in names)]
    for c in cells:
        numbers = (c.lost, c.doubled, c.tracebacks, round(c.seconds))
        lines.append(f"{c.subject:<20}{c.fault:<16}" + "".join(f"{n:>11}" for n in numbers))
    totals = [sum(getattr(c, name) for c in cells) for name in ("lost", "doubled", "tracebacks")]
    words = f"{totals[0]} lost, {totals[1]} doubled, {totals[2]} tracebacks"
    lines.append(f"{len(cells)} cells: {words}")
    return "\n".join(lines)

"""A captured request's pre-collapse residual, from SGLang's scheduler to the command.

SGLang's ``return_hidden_states`` would turn every row into Python numbers, send it through two
processes, and drop all but the last chunk of a chunked prefill. Here ``PID-NUMBER.rows`` is a line
of JSON and raw rows; ``PID.writer`` says what failed, and is locked until all rows are in files.
"""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import shutil
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path

import torch

from sglang_hyperdflash.seams import around
from sglang_hyperdflash.targets.loaded import CAPTURE_FOLDER
from sglang_hyperdflash.tools.errors import HyperDFlashError

REQUEST_PREFIX = "hyperdflash-capture-"  # of INDEX-FIRST; rows before FIRST are left out
BYTES_UNDER_WAY = 2 << 30  # of rows that are in no file yet, beyond which the scheduler waits
PAUSE = 0.01  # seconds between two looks for files
_PREFILLED = "hyperdflash_prefilled"


@around(
    "sglang.srt.managers.scheduler_components.batch_result_processor"
    ":SchedulerBatchResultProcessor._append_prefill_hidden_states",
    "eaa916a9a56f",
    only_with=CAPTURE_FOLDER,
)
def write_prefill_residual(original, self, *args, **kwargs):
    """Hand a captured request's rows to the thread that writes them to ``PID-NUMBER.rows``.

    SGLang calls it for every request of a prefill batch, middle chunks included, before it replies.
    Requests that are not captured go to SGLang's own code.
    """
    req = kwargs["req"]
    if not str(req.rid).startswith(REQUEST_PREFIX):
        return original(self, *args, **kwargs)
    start = kwargs["hidden_state_offset"]
    end = start + kwargs["extend_input_len"]
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    # Under DP attention each group of attention ranks has different requests.
    if parallel.attn_tp_rank == 0 and parallel.attn_cp_rank == 0:
        position = getattr(req, _PREFILLED, 0)
        setattr(req, _PREFILLED, position + end - start)
        skipped = max(int(req.rid.rpartition("-")[2]) - position, 0)
        rows = kwargs["logits_output"].hidden_states[start + skipped : end].detach()
        if len(rows):
            # Pinned: SGLang's own finished copy of a pass. A later pass may overwrite other memory.
            rows = rows if rows.is_pinned() else rows.to("cpu", copy=True)
            RowWriter(os.environ[CAPTURE_FOLDER]).put(req.rid, position + skipped, rows)
    return end


@cache
class RowWriter(threading.Thread):
    """Writes rows to a folder, one for each; what comes while it writes a file makes the next.

    A full disk drops rows, which the command reports: an error would end SGLang's scheduler.
    """

    def __init__(self, folder: str) -> None:
        super().__init__(name="hyperdflash-capture", daemon=True)
        self._path, self._changed = Path(folder, f"{os.getpid()}.writer"), threading.Condition()
        self._parts: list[tuple[str, int, torch.Tensor]] = []
        self._size, self._state = 0, self._path.open("wb", buffering=0)
        self.start()

    def put(self, rid: str, first: int, rows: torch.Tensor) -> None:
        """Take ``rows [n, width]`` of a request from its row ``first`` on, once there is room."""
        with self._changed:
            self._changed.wait_for(lambda: self._size < BYTES_UNDER_WAY)
            if not self._size:
                fcntl.flock(self._state, fcntl.LOCK_EX)
            self._parts.append((rid, first, rows))
            self._size += rows.nbytes
            self._changed.notify_all()

    def run(self) -> None:
        """The thread."""
        for number in itertools.count():
            with self._changed:
                self._changed.wait_for(lambda: self._parts)
                parts, size, self._parts = self._parts, self._size, []
            path = self._path.with_name(f"{os.getpid()}-{number}.partial")
            try:
                rows, index = parts[0][2], [(rid, first, len(each)) for rid, first, each in parts]
                line = json.dumps([str(rows.dtype).removeprefix("torch."), rows.shape[1], index])
                with path.open("wb") as file:
                    file.write(f"{line}{' ' * (~len(line) % 64)}\n".encode())  # rows are aligned
                    for _, _, rows in parts:
                        file.write(rows.contiguous().view(torch.uint8).numpy())
                path.rename(path.with_suffix(".rows"))
            except Exception as error:
                with suppress(OSError):
                    path.unlink(missing_ok=True)  # leaves room for the reason
                    self._state.write(f"{error}; ".encode())
            parts, rows = [], None  # their memory, before the next wait
            with self._changed:
                self._size -= size
                if not self._size:
                    fcntl.flock(self._state, fcntl.LOCK_UN)
                self._changed.notify_all()


class RowReader:
    """Maps files of row writers and removes them; one task looks for all requests that wait."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._looking = folder, None
        self._parts: dict[str, dict[int, torch.Tensor]] = {}

    async def take(self, rid: str, count: int) -> torch.Tensor:
        """Wait for the ``count`` rows of an answered request; return them, ``[count, width]``.

        Raises:
            HyperDFlashError: rows were dropped, or are missing when all that came is written.
        """
        held, more, failed = 0, True, ""
        while held < count and more and not failed:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self.look())
            more, failed = await asyncio.shield(self._looking)
            held = sum(map(len, self._parts.get(rid, {}).values()))
        if held != count:
            raise HyperDFlashError(
                f"expected {count} residual rows of a conversation in {self.folder}, found "
                f"{held}; {failed}{shutil.disk_usage(self.folder).free / 2**20:.0f} MiB are free "
                "there. On a full disk, free space or set TMPDIR, and repeat the command: finished "
                "shards are kept. Else SGLang has changed: run `hyperdflash check`."
            )
        rows = [part for _, part in sorted(self._parts.pop(rid).items())]
        return rows[0] if len(rows) == 1 else await asyncio.to_thread(torch.cat, rows)

    async def look(self) -> tuple[bool, str]:
        """Map new files, after a pause; whether more were to come, and what failed."""
        await asyncio.sleep(PAUSE)
        writers, idle = list(self.folder.glob("*.writer")), 0
        for path in writers:
            with path.open() as file, suppress(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                idle += 1
        failed = "".join(path.read_text() for path in writers)
        for path in self.folder.glob("*.rows"):
            with path.open("rb") as file:
                line = file.readline()
            dtype, width, index = json.loads(line)
            rows = torch.from_file(str(path), size=path.stat().st_size, dtype=torch.uint8)
            path.unlink()  # its space is free when the last of its rows is
            rows = rows[len(line) :].view(getattr(torch, dtype)).view(-1, width)
            for rid, first, count in index:
                self._parts.setdefault(rid, {})[first], rows = rows[:count], rows[count:]
        return idle < len(writers), failed

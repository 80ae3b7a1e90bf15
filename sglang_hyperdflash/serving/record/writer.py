"""The thread that puts whole recorded requests into a store; what it has no room for, it sheds."""

from __future__ import annotations

import itertools
import logging
import queue
import threading
import time
from contextlib import ExitStack, suppress
from weakref import WeakSet

import torch

from sglang_hyperdflash.serving.record.recorder import Finished, PassRows, Recorder, Recording
from sglang_hyperdflash.serving.record.settings import (
    BROKEN,
    BYTES,
    DISK,
    MEMORY,
    RECORD,
    REQUESTS,
    RecordSetting,
)
from sglang_hyperdflash.tools.errors import HyperDFlashError
from sglang_hyperdflash.tools.ownership import InUse
from sglang_hyperdflash.training.samples import Sample
from sglang_hyperdflash.training.store.manifest import MANIFESTS, Identity
from sglang_hyperdflash.training.store.shard import is_finite
from sglang_hyperdflash.training.store.writer import StoreWriter, bytes_of, open_writer

logger = logging.getLogger(__name__)

KIND = "hyperdflash recording"
# A shard is written when it is so large, or its first request waits so long.
SHARD_BYTES, SHARD_SECONDS = 64 << 20, 10.0
# Rows of requests that run, and of those that wait for the disk.
HOST_BYTES = 4 << 30
# Share of the budget for a sample of all older requests.
RESERVOIR = 0.5


def open_store(setting: RecordSetting, identity: Identity, held: ExitStack) -> StoreWriter:
    """This server's writer, under the first name that no running server has.

    So a restarted server goes on with what it, or another one that has ended, has written.

    Raises:
        NotOurs: the folder holds something else or another target's states.
        WriteFailed: it cannot be written.
    """
    setting.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if setting.folder.stat().st_mode & 0o077:
        logger.warning(f"{RECORD}: {setting.folder} holds what users write, and is not mode 0700.")
    for number in itertools.count():
        with suppress(InUse):
            opened = open_writer(setting.folder, identity, f"server-{number}", KIND, {})
            return held.enter_context(opened)
    raise AssertionError("unreachable")


class Writer(threading.Thread):
    """Takes what the recorder has queued, until :meth:`close`.

    Args:
        held: what is closed at the end, the store's writer.
    """

    def __init__(self, recorder: Recorder, store: StoreWriter, held: ExitStack) -> None:
        super().__init__(name="hyperdflash-record", daemon=True)
        self.recorder, self.store, self._held = recorder, store, held
        budget = recorder.setting.budget
        self.budget, self.shard_bytes = budget, min(SHARD_BYTES, budget // 8)
        self._recordings: WeakSet[Recording] = WeakSet()
        self._waiting: list[tuple[Sample, torch.Tensor]] = []
        self._size, self._since, self._disk_failed = 0, 0.0, False

    def close(self) -> None:
        """Write what is whole, and end."""
        self.recorder.queue.put(None)
        self.join()
        self._held.close()

    def run(self) -> None:
        """The thread; an error of ours ends the recording, never the server."""
        try:
            if self.recorder.ring.on_device:  # else its events make a context on the first GPU
                self.recorder.streams.set_device(self.recorder.ring.device.device)
            while (item := self._next()) is not None:
                if item:
                    self.take(*item)
                late = time.monotonic() - self._since > SHARD_SECONDS
                if self._waiting and (late or self._size >= self.shard_bytes):
                    self.flush()
            self.flush()
        except Exception as error:
            logger.exception("the writer failed")
            self.recorder.stop(repr(error))

    def _next(self) -> tuple | None:
        """The next item; empty after a while without one, None at the end."""
        try:
            return self.recorder.queue.get(timeout=SHARD_SECONDS / 4)
        except queue.Empty:
            return ()

    def take(
        self, done: PassRows, kept: list[tuple[Recording, slice]], finished: list[Finished]
    ) -> None:
        """Move the rows of a pass out of the ring; its requests that ended wait for a shard."""
        if done.event is not None:
            done.event.synchronize()
        for recording, rows in kept:
            copied = self.recorder.ring.host[rows].clone()
            with self.recorder.shedding:
                if not recording.shed:
                    recording.rows.append(copied)
                    recording.size += copied.nbytes
                    self._recordings.add(recording)
        done.piece.free = True
        for one in finished:
            self._add(one)
        held = self._size + sum(each.size for each in self._recordings)
        for recording, _ in kept if held > HOST_BYTES else ():
            if recording in self._recordings:  # else it waits for the disk, whole
                self.recorder.shed(recording, MEMORY)

    def _add(self, finished: Finished) -> None:
        recording, tokens = finished.recording, torch.tensor(finished.tokens)
        self._recordings.discard(recording)
        rows, recording.rows = recording.rows, []
        if recording.shed:
            return
        if missing := len(tokens) - sum(map(len, rows)):
            # The last token's own row: no pass has read that token.
            rows.append(rows[-1].new_zeros(missing, rows[-1].shape[1]))
        residual = torch.cat(rows)
        if not is_finite(residual):
            self.recorder.shed(recording, BROKEN)
            return
        if not self._waiting:
            self._since = time.monotonic()
        sample = Sample(tokens.int(), ((finished.answer, len(tokens)),))
        self._waiting.append((sample, residual))
        self._size += bytes_of(sample, self.store.identity)

    def flush(self) -> None:
        """Write a shard of all requests that wait; a full disk sheds them."""
        if not self._waiting:
            return
        (samples, residuals), size = zip(*self._waiting, strict=True), self._size
        self._waiting, self._size = [], 0
        if not (self.store.folder / MANIFESTS).is_dir():
            self.recorder.stop(f"{self.store.folder} has been removed")
            return
        try:
            self.store.retain(self.budget - size, RESERVOIR)
            self.store.add(self.store.position, samples, [(rows,) for rows in residuals])
        except (HyperDFlashError, OSError) as error:
            self.recorder.count(DISK, len(samples))
            if not self._disk_failed:
                logger.warning(f"{RECORD}: {len(samples)} requests were not recorded: {error}")
            self._disk_failed = True
            return
        self._disk_failed = False
        self.recorder.count(REQUESTS, len(samples))
        self.recorder.count(BYTES, size)

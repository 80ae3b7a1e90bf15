"""What a recording server does in its passes: keep the residual rows of some requests.

The rows travel as SGLang's auxiliary output of a pass (seam: ``managers.auxiliary_output``): the
scheduler asks for their copy after the pass, and hands over the committed tokens when it processes
the results. Nothing here waits: a request whose rows find no room is shed, whole, and counted.
"""

from __future__ import annotations

import logging
import queue
import threading
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from sglang.srt.managers.auxiliary_output import append_auxiliary_output
from sglang.srt.managers.schedule_batch import FINISH_ABORT
from sglang.srt.managers.utils import is_health_check_generate_req

from sglang_hyperdflash.serving.record.ring import Piece, Ring
from sglang_hyperdflash.serving.record.settings import (
    BEHIND,
    BROKEN,
    CACHED,
    RECORD,
    UNFINISHED,
    RecordSetting,
)
from sglang_hyperdflash.serving.scheduler.finish import NAN_MATCHED

logger = logging.getLogger(__name__)

_RECORDING = "hyperdflash_recording"


@dataclass(eq=False)
class Recording:
    """A request that is recorded; it lives as long as SGLang's ``Req``, even one that vanishes.

    Attributes:
        start: position of its first row.
        stop: position before which its last row is at the latest.
        end: position after its last row so far.
        shed: whether it was given up.
        rows: ``[n, m * d]`` each; the writer's alone.
        size: bytes of ``rows``; the writer's alone.
    """

    start: int
    stop: int
    end: int
    shed: bool = False
    rows: list[torch.Tensor] = field(default_factory=list)
    size: int = 0


def recording_of(req: Any) -> Recording | None:
    """The request's recording, or None."""
    recording = getattr(req, _RECORDING, None)
    return None if recording is None or recording.shed else recording


@dataclass(frozen=True)
class Finished:
    """A whole request: its tokens from the first row on, and where its answer begins in them."""

    recording: Recording
    tokens: array
    answer: int


@dataclass(frozen=True)
class Part:
    """A request's rows ``first`` to ``last`` of a pass.

    Attributes:
        index: the request's, in the batch.
        position: of the first row; None for a block, which begins with the last token that is
            committed by then.
    """

    index: int
    recording: Recording
    first: int
    last: int
    position: int | None


class PassRows:
    """The rows of one pass; SGLang's ``DeviceAuxiliaryOutput`` and ``HostAuxiliaryOutput``."""

    def __init__(self, recorder: Recorder, piece: Piece, parts: Sequence[Part]) -> None:
        self.recorder, self.piece, self.parts, self.event = recorder, piece, parts, None

    def copy_to_host(self, copy_tensor: Any) -> PassRows:
        """Launch the copy on a stream of its own; results' copies, and who waits for them, go on.

        Seam: called in the stream that copies results, which has waited for the pass.
        """
        ring, streams = self.recorder.ring, self.recorder.streams
        if ring.on_device:
            side, rows = self.recorder.stream, slice(self.piece.start, self.piece.stop)
            side.wait_stream(streams.current_stream())
            with streams.stream(side):
                ring.host[rows].copy_(ring.device[rows], non_blocking=True)
            self.event = streams.Event()
            self.event.record(side)
        return self

    def consume(self, batch: Any, commits: Sequence[Any]) -> None:
        """Hand the committed rows to the writer.

        Args:
            commits: of every request, SGLang's ``CommittedTokens`` of this pass, or None.
        """
        kept: list[tuple[Recording, slice]] = []
        finished: list[Finished] = []
        row = self.piece.start
        for part in self.parts:
            req, recording, commit = batch.reqs[part.index], part.recording, commits[part.index]
            position, count = part.position, part.last - part.first
            if position is None:
                # A block: its anchor, and drafts that are tokens by now. None with overlap, where
                # a request that has ended runs once more.
                begun, tokens = (commit.output_index, commit.token_ids) if commit else (0, ())
                position, count = len(req.origin_input_ids) + begun - 1, len(tokens)
            if count and recording_of(req) is recording:
                rows = self._new(recording, position, count)
                if rows:
                    kept.append((recording, slice(row + rows.start, row + rows.stop)))
                done = self.recorder.finish(req, recording)
                if done is not None:
                    finished.append(done)
            row += part.last - part.first
        self.recorder.queue.put((self, kept, finished))

    def _new(self, recording: Recording, position: int, count: int) -> range:
        """Which of ``count`` rows from ``position`` on the recording lacks.

        After a retraction, rows come again; they never leave a gap.
        """
        if position > recording.end:
            self.recorder.shed(recording, BROKEN)
            return range(0)
        last = min(position + count, recording.stop)
        rows = range(recording.end - position, last - position)
        recording.end = max(recording.end, last)
        return rows


class Recorder:
    """Takes rows in the worker's passes; its writer (:mod:`.writer`) takes whole requests.

    Args:
        rows: size of the ring, which holds rows until the writer has taken them.
        width: of the residual, ``m * d``.
        dtype: of the residual.

    Attributes:
        counters: prometheus counters of ``REQUESTS``, ``BYTES`` and ``REASONS``; empty in a server
            without metrics.
        queue: ``(pass, its kept rows, finished requests)`` for the writer.
        stopped: whether recording has ended.
        shedding: held while a recording is given up, or gets rows.
    """

    def __init__(
        self, setting: RecordSetting, rows: int, width: int, dtype: torch.dtype, device: Any
    ) -> None:
        self.setting, self.stopped = setting, False
        device = torch.device(device)
        self.ring = Ring(rows, width, dtype, device)
        self.streams = torch.get_device_module(device)
        self.stream = self.streams.Stream() if self.ring.on_device else None
        self.queue: queue.SimpleQueue = queue.SimpleQueue()
        self.counters: dict[str, Any] = {}
        self.shedding = threading.Lock()

    # In the worker's passes.

    def prefilled(self, batch: Any, output: Any) -> None:
        """Take the rows of a prefill; of a mixed batch also the running requests'.

        Args:
            batch: SGLang's ``ScheduleBatch``. output: the target's, whose ``hidden_states`` has a
                row for every computed token.
        """
        parts, first = [], 0
        each = zip(batch.reqs, batch.prefix_lens, batch.extend_lens, strict=True)
        for index, (req, prefix, extend) in enumerate(each):
            recording = self._recording(req, prefix)
            if recording is not None:
                # ``end`` may lag by the passes in flight: then some rows are taken twice.
                begin = max(recording.end - prefix, 0)
                last = min(extend, recording.stop - prefix)
                if begin < last:
                    rows = first + begin, first + last, prefix + begin
                    parts.append(Part(index, recording, *rows))
            first += extend
        self._take(parts, output)

    def decoded(self, batch: Any, output: Any, width: int) -> None:
        """Take the rows of a round: ``width`` of each request."""
        parts = [
            Part(i, recording, i * width, (i + 1) * width, None)
            for i, recording in enumerate(map(recording_of, batch.reqs))
            if recording is not None
        ]
        self._take(parts, output)

    def _recording(self, req: Any, prefix: int) -> Recording | None:
        """A request's recording, which its first pass decides on."""
        if not hasattr(req, _RECORDING):
            setattr(req, _RECORDING, None)
            if not is_health_check_generate_req(req) and self.setting.wants(req):
                positions = self.setting.range(len(req.origin_input_ids), prefix)
                if positions is None:
                    self.count(CACHED)
                else:
                    setattr(
                        req, _RECORDING, Recording(positions.start, positions.stop, positions.start)
                    )
        return recording_of(req)

    def _take(self, parts: list[Part], output: Any) -> None:
        count = sum(part.last - part.first for part in parts)
        if not count or self.stopped:
            return
        piece = self.ring.take(count)
        if piece is None:
            for part in parts:
                self.shed(part.recording, BEHIND)
            return
        rows = output.hidden_states
        into = self.ring.device[piece.start : piece.stop]
        torch.cat([rows[part.first : part.last] for part in parts], out=into)
        output.auxiliary_device_output = append_auxiliary_output(
            output.auxiliary_device_output, PassRows(self, piece, parts)
        )

    # When results are processed.

    def finish(self, req: Any, recording: Recording) -> Finished | None:
        """A request's end, or its recording's; None where it goes on or is shed."""
        if not req.finished() and recording.end < recording.stop:
            return None
        setattr(req, _RECORDING, None)
        prompt, reason = len(req.origin_input_ids), req.finished_reason
        tokens = array("q", req.origin_input_ids) + array("q", req.output_ids_through_stop)
        tokens = tokens[: recording.stop]
        failed = isinstance(reason, FINISH_ABORT) or getattr(reason, "matched", 0) == NAN_MATCHED
        if failed or len(tokens) <= prompt:
            self.shed(recording, UNFINISHED)
        elif recording.end < len(tokens) - 1:
            self.shed(recording, BROKEN)
        else:
            return Finished(recording, tokens[recording.start :], prompt - recording.start)
        return None

    # From any thread.

    def shed(self, recording: Recording, reason: str) -> None:
        """Give a request up, and count it once."""
        with self.shedding:
            first, recording.shed = not recording.shed, True
            recording.rows, recording.size = [], 0
        if first:
            self.count(reason)

    def stop(self, why: str) -> None:
        """Take no more rows; whole requests that wait are still written."""
        if not self.stopped:
            logger.warning(f"{RECORD}: recording has stopped: {why}. Serving goes on.")
        self.stopped = True

    def count(self, name: str, amount: int = 1) -> None:
        """Add to a metric."""
        if name in self.counters:
            self.counters[name].inc(amount)

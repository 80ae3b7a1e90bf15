"""Where a decoding round's time goes: target pass, drafting and the rest, scheduling between.

Only in a server started with ``HYPERDFLASH_ROUND_TIMES=FILE``. Every algorithm is timed alike, at
two of SGLang's functions; on CUDA the device is synchronised around them, so such a server is for
shares of a round, not for throughput.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch

from sglang_hyperdflash.seams import Seam

ROUND_TIMES = "HYPERDFLASH_ROUND_TIMES"
FLUSH_EVERY = 20
# A longer pause between two rounds is an idle server, not scheduling.
IDLE_SECONDS = 0.2

_rounds: list[list[float]] = []
_target_seconds = 0.0


def _now() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def time_target(original, self, *args, **kwargs):
    """Seam: ``TpModelWorker.forward_batch_generation``; the draft's own passes are not counted."""
    global _target_seconds
    if self.is_draft_worker:
        return original(self, *args, **kwargs)
    started = _now()
    result = original(self, *args, **kwargs)
    _target_seconds += _now() - started
    return result


def time_round(original, self, batch, *args, **kwargs):
    """Seam: ``Scheduler.run_batch``.

    One line a round, ``[start, end, target seconds, batch size, width]``; the width is None without
    speculation.
    """
    global _target_seconds
    decoding, size = batch.forward_mode.is_decode(), len(batch.reqs)
    _target_seconds, started = 0.0, _now()
    result = original(self, batch, *args, **kwargs)
    if decoding:
        width = getattr(result, "speculative_num_draft_tokens", None)
        _rounds.append([started, _now(), _target_seconds, size, width])
    if len(_rounds) >= FLUSH_EVERY:
        with Path(os.environ[ROUND_TIMES]).open("a") as out:
            out.writelines(json.dumps(entry) + "\n" for entry in _rounds)
        _rounds.clear()
    return result


def _gaps(rounds: list[list[float]]) -> Iterator[float]:
    for before, after in pairwise(rounds):
        if before[3] == after[3] and after[0] - before[1] < IDLE_SECONDS:
            yield after[0] - before[1]


def summarise(path: Path, batch_size: int) -> dict[str, float] | None:
    """Medians over the rounds of one batch size, in milliseconds; None without ten of them.

    Returns:
        ``target`` (its passes), ``draft`` (all else inside a round: drafting, accepting, draft
        K/V), ``scheduler`` (between rounds) and ``rounds``, their number.
    """
    if not path.is_file():
        return None
    every = [json.loads(line) for line in path.read_text().splitlines()]
    rounds = [entry for entry in every if entry[3] == batch_size]
    gaps = list(_gaps(rounds))
    if len(rounds) < 10 or not gaps:
        return None
    return {
        "target": 1e3 * median(r[2] for r in rounds),
        "draft": 1e3 * median(r[1] - r[0] - r[2] for r in rounds),
        "scheduler": 1e3 * median(gaps),
        "rounds": len(rounds),
    }


REASON = "the time of a round is measured where every algorithm passes"
SEAMS = (
    Seam(
        "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation",
        "around",
        time_target,
        (
            "self",
            "batch",
            "forward_batch",
            "pp_proxy_tensors",
            "is_verify",
            "skip_attn_backend_init",
            "capture_hidden_mode",
            "return_kv_loc_plan",
        ),
        "074f2a1c0794",
        REASON,
        only_with=ROUND_TIMES,
    ),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler.run_batch",
        "around",
        time_round,
        ("self", "batch", "pp_proxy_tensors"),
        "4e9bb4d5e649",
        REASON,
        only_with=ROUND_TIMES,
    ),
)

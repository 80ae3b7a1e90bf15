"""Where a pass's time goes: the target, the drafter, draft K/V, the rest, scheduling between.

Only in a server started with ``HYPERDFLASH_ROUND_TIMES=FILE``. Every algorithm is timed alike, at
functions of SGLang's, and ours once more where drafts are chosen; on CUDA the device is
synchronised around them, so such a server is for shares of a round, not for throughput.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterator
from functools import wraps
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import torch

from sglang_hyperdflash.seams import Seam

logger = logging.getLogger(__name__)

ROUND_TIMES = "HYPERDFLASH_ROUND_TIMES"
FLUSH_EVERY = 20
# A longer pause between two rounds is an idle server, not scheduling.
IDLE_SECONDS = 0.2


class Pass(NamedTuple):
    """One line of the file: a decoding round, or a prefill.

    start, end, target, draft_kv, block, choice: seconds; the target's passes, writing draft K/V,
    the drafter's passes, and choosing the drafts behind them: LM head, candidates, dependency head.
    A CUDA graph of the drafter's pass holds LM head, candidates and the greedy drafts too: compare
    the sum of both there; SGLang's own EAGLE has its graph in neither. requests: of the batch.
    width: None without speculation. decoding: not a prefill.
    """

    start: float
    end: float
    target: float
    requests: int
    width: int | None
    draft_kv: float
    decoding: bool
    block: float = 0.0
    choice: float = 0.0


_passes: list[Pass] = []
# Seconds of the pass that is under way.
_spent = dict.fromkeys(("target", "draft_kv", "block", "choice"), 0.0)


def _now() -> float:
    # EAGLE captures a graph of its passes: no waiting there, nor a time worth having.
    if torch.cuda.is_available() and not torch.cuda.is_current_stream_capturing():
        torch.cuda.synchronize()
    return time.perf_counter()


def _timed(part: str, call: Callable, *args: Any, **kwargs: Any) -> Any:
    """What ``call`` gives; its seconds are of ``part``."""
    started = _now()
    result = call(*args, **kwargs)
    _spent[part] += _now() - started
    return result


def time_target(original, self, *args, **kwargs):
    """Seam: ``TpModelWorker.forward_batch_generation``; the draft's own passes are not counted."""
    if self.is_draft_worker:
        return original(self, *args, **kwargs)
    return _timed("target", original, self, *args, **kwargs)


def time_draft_kv(original, self, *args, **kwargs):
    """Seam: ``DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc``, all that writes them."""
    return _timed("draft_kv", original, self, *args, **kwargs)


def time_block(original, self, *args, **kwargs):
    """Seam: ``ModelRunner.forward``; the target's own passes are not counted."""
    if not self.is_draft_worker:
        return original(self, *args, **kwargs)
    return _timed("block", original, self, *args, **kwargs)


def timed_choice(method: Callable) -> Callable:
    """The method that chooses a block's drafts, timed; itself in a server that times nothing."""
    if not os.environ.get(ROUND_TIMES):
        return method

    @wraps(method)
    def timed(*args, **kwargs):
        return _timed("choice", method, *args, **kwargs)

    return timed


def time_pass(original, self, batch, *args, **kwargs):
    """Seam: ``Scheduler.run_batch``."""
    mode, size = batch.forward_mode, len(batch.reqs)
    decoding = mode.is_decode()
    _spent.update(dict.fromkeys(_spent, 0.0))
    started = _now()
    result = original(self, batch, *args, **kwargs)
    if size and not mode.is_idle():
        width = getattr(result, "speculative_num_draft_tokens", None)
        _passes.append(
            Pass(started, _now(), requests=size, width=width, decoding=decoding, **_spent)
        )
    if len(_passes) >= FLUSH_EVERY:
        from sglang.srt.runtime_context import get_parallel  # not before SGLang is there

        if get_parallel().tp_rank == 0:
            _append(Path(os.environ[ROUND_TIMES]))
        _passes.clear()
    return result


def _append(path: Path) -> None:
    """A path that cannot be written costs the times, not the requests under way."""
    try:
        with path.open("a") as out:
            out.writelines(json.dumps(entry) + "\n" for entry in _passes)
    except OSError as error:
        logger.warning("%s=%s: %s. No times are written.", ROUND_TIMES, path, error)


def read_passes(path: Path) -> list[Pass]:
    """All that a server wrote, in order."""
    return [Pass(*json.loads(line)) for line in path.read_text().splitlines()]


def _gaps(passes: list[Pass], batch_size: int) -> Iterator[float]:
    for before, after in pairwise(passes):
        gap = after.start - before.end
        alike = before.decoding and after.decoding
        if alike and before.requests == after.requests == batch_size and gap < IDLE_SECONDS:
            yield gap


def summarise(path: Path, batch_size: int) -> dict[str, float] | None:
    """Medians over the rounds of one batch size, in milliseconds; None without ten of them.

    Returns:
        ``target`` (its passes), ``draft`` (all else inside a round: drafting, accepting, draft
        K/V), of that ``block``, ``choice`` and ``draft_kv``, then ``scheduler`` (between rounds)
        and ``rounds``, their number.
    """
    if not path.is_file():
        return None
    passes = read_passes(path)
    rounds = [one for one in passes if one.decoding and one.requests == batch_size]
    gaps = list(_gaps(passes, batch_size))
    if len(rounds) < 10 or not gaps:
        return None
    return {
        "target": 1e3 * median(r.target for r in rounds),
        "draft": 1e3 * median(r.end - r.start - r.target for r in rounds),
        **{
            part: 1e3 * median(getattr(r, part) for r in rounds)
            for part in ("block", "choice", "draft_kv")
        },
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
        "sglang.srt.model_executor.model_runner:ModelRunner.forward",
        "around",
        time_block,
        (
            "self",
            "forward_batch",
            "skip_attn_backend_init",
            "pp_proxy_tensors",
            "reinit_attn_backend",
            "split_forward_count",
        ),
        "19034759e5d5",
        "the drafter's pass is a part of a round without a name of its own",
        only_with=ROUND_TIMES,
    ),
    Seam(
        "sglang.srt.managers.scheduler:Scheduler.run_batch",
        "around",
        time_pass,
        ("self", "batch", "pp_proxy_tensors"),
        "4e9bb4d5e649",
        REASON,
        only_with=ROUND_TIMES,
    ),
    Seam(
        "sglang.srt.speculative.dflash_worker_v2"
        ":DFlashWorkerV2._append_target_hidden_to_draft_kv_by_loc",
        "around",
        time_draft_kv,
        (
            "self",
            "target_hidden",
            "cache_loc",
            "positions",
            "cache_loc_2d",
            "commit_lens",
            "extend_lens",
        ),
        "fae12d81a6e1",
        "draft K/V are a part of a round without a name of its own",
        only_with=ROUND_TIMES,
    ),
)

"""``python -m eval.capture_rate``: what a capture takes of the scheduler's thread, at V4's width.

The hook gets dummy rows of a prefill chunk that requests share. ``before`` is what it did up
to commit b6fd39dd, ``copied`` what it does on a CPU, ``handed over`` what with pinned rows, which
the overlap scheduler has on a GPU; here they only count as pinned. Of each: median, least and most.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest import mock

import torch
from sglang.srt import runtime_context

from sglang_hyperdflash.serving.capture_rows import REQUEST_PREFIX, RowWriter
from sglang_hyperdflash.serving.capture_rows import write_prefill_residual as write
from sglang_hyperdflash.targets.loaded import CAPTURE_FOLDER
from sglang_hyperdflash.tools.atomic import write_json
from sglang_hyperdflash.tools.provenance import provenance

OUT = Path(__file__).parent / "results" / "training_scale" / "capture_rate.json"
WIDTH, CHUNK, REQUESTS, ROUNDS = 16384, 4096, 16, 8
GB = CHUNK * WIDTH * 2 / 1e9
Way = Callable[[Path, str, torch.Tensor], None]


def before(folder: Path, rid: str, rows: torch.Tensor) -> None:
    data = rows.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    with (folder / f"{rid}.bfloat16.{rows.shape[-1]}").open("ab") as file:
        file.write(data)


def after(_folder: Path, rid: str, rows: torch.Tensor) -> None:
    output = {"req": SimpleNamespace(rid=rid), "logits_output": SimpleNamespace(hidden_states=rows)}
    write(None, None, **output, hidden_state_offset=0, extend_input_len=len(rows))


def measure(way: Way, pinned: bool, chunk: torch.Tensor) -> tuple[float, float]:
    """Seconds of the calling thread per GB, and GB/s until all rows are in files."""
    is_pinned = mock.patch.object(torch.Tensor, "is_pinned", lambda _: pinned)
    with TemporaryDirectory() as name, is_pinned:
        os.environ[CAPTURE_FOLDER] = name
        RowWriter(name)
        begin = time.perf_counter()
        for i, rows in enumerate(chunk.split(CHUNK // REQUESTS)):
            way(Path(name), f"{REQUEST_PREFIX}{i}-0", rows)
        called = time.perf_counter() - begin
        with (Path(name) / f"{os.getpid()}.writer").open() as state:
            fcntl.flock(state, fcntl.LOCK_SH)  # until all is written
            assert not state.read()  # what failed
        return called / GB, GB / (time.perf_counter() - begin)


def main() -> None:
    chunk = torch.randn(CHUNK, WIDTH).bfloat16()
    ways = {"before": (before, False), "copied": (after, False), "handed over": (after, True)}
    runs: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
    rank = SimpleNamespace(attn_tp_rank=0, attn_cp_rank=0)
    with mock.patch.object(runtime_context, "get_parallel", lambda: rank):
        for _ in range(ROUNDS + 1):  # the first warms up
            for name, way in ways.items():
                runs[name].append(measure(*way, chunk))
    about = {"gb": GB, "rounds": ROUNDS, "requests": REQUESTS, "row_bytes": 2 * WIDTH}
    for name, each in runs.items():
        thread, total = ([median(x), min(x), max(x)] for x in zip(*each[1:], strict=True))
        about[name] = {"seconds_of_the_thread_per_gb": thread, "gb_per_second_in_files": total}
        print(name, about[name])
    write_json(OUT, about | {"provenance": provenance()}, indent=1)


if __name__ == "__main__":
    main()

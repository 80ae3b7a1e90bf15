"""A hook in the scheduler of a capture that writes a request's pre-collapse residual to disk.

SGLang's ``return_hidden_states`` would turn every row into Python numbers, send it through two
processes, and drop all but the last chunk of a chunked prefill.
"""

from __future__ import annotations

import os
from pathlib import Path

import torch

from sglang_hyperdflash.seams import around
from sglang_hyperdflash.targets.loaded import CAPTURE_FOLDER

REQUEST_PREFIX = "hyperdflash-capture-"


@around(
    "sglang.srt.managers.scheduler_components.batch_result_processor"
    ":SchedulerBatchResultProcessor._append_prefill_hidden_states",
    "eaa916a9a56f",
    only_with=CAPTURE_FOLDER,
)
def write_prefill_residual(original, self, *args, **kwargs):
    """Append a captured request's rows to ``FOLDER/<rid>.<dtype>.<width>``.

    SGLang calls it for every request of a prefill batch, middle chunks included. Requests that are
    not captured go to SGLang's own code.
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
        rows = kwargs["logits_output"].hidden_states[start:end]
        append_rows(Path(os.environ[CAPTURE_FOLDER]), req.rid, rows)
    return end


def append_rows(folder: Path, rid: str, rows: torch.Tensor) -> None:
    """Append ``rows [n, width]`` as raw bytes.

    On a full disk the request's rows are dropped, and the command reports that they are missing. An
    error here would end SGLang's scheduler, and the command with it.
    """
    dtype = str(rows.dtype).removeprefix("torch.")
    data = rows.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    path = folder / f"{rid}.{dtype}.{rows.shape[-1]}"
    try:
        with path.open("ab") as file:
            file.write(data)
    except OSError:
        path.unlink(missing_ok=True)


def take_rows(folder: Path, rid: str) -> torch.Tensor | None:
    """Remove a finished request's rows from the folder; return them ``[n, width]``, or None."""
    path = next(folder.glob(f"{rid}.*.*"), None)
    if path is None:
        return None
    _, dtype, width = path.name.rsplit(".", 2)
    data = bytearray(path.read_bytes())
    path.unlink()
    return torch.frombuffer(data, dtype=getattr(torch, dtype)).view(-1, int(width))

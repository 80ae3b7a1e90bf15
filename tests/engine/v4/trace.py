"""Row by row: what attention was asked and answered, and what the drafter was given."""

import json
import os
from pathlib import Path

import torch

ROWS = "V4_ROWS"  # a file: [request, layer, position, sum of queries, sum of outputs] a line
RESIDUALS = "V4_RESIDUALS"  # a file: ``[m * d]`` by position, of the one request that is served

Rows = dict[tuple[str, int, int], tuple[float, float]]


def _rows_of_each(forward_batch) -> list[int]:
    """How many rows of a batch each of its requests has."""
    mode = forward_batch.forward_mode
    if mode.is_target_verify():
        return [int(forward_batch.spec_info.draft_token_num)] * len(forward_batch.rids)
    if mode.is_decode():
        return [1] * len(forward_batch.rids)
    return list(forward_batch.extend_seq_lens_cpu)


def trace_rows(path: str) -> None:
    """Write one line a row. Seam: ``DeepseekV4AttnBackend.forward``."""
    from sglang.srt.layers.attention.deepseek_v4_backend import DeepseekV4AttnBackend

    forward = DeepseekV4AttnBackend.forward
    sink = open(path, "w")  # noqa: SIM115

    def traced(self, q, k, v, layer, forward_batch, *args, **kwargs):
        out = forward(self, q, k, v, layer, forward_batch, *args, **kwargs)
        if forward_batch.forward_mode.is_idle() or not forward_batch.rids or self.is_draft_runner:
            return out
        counts = zip(forward_batch.rids, _rows_of_each(forward_batch), strict=True)
        owners = [rid for rid, n in counts for _ in range(n)]
        positions = self.forward_metadata.core_attn_metadata.positions_casual.tolist()
        for i, rid in enumerate(owners):
            sums = [float(x[i].double().sum()) for x in (q, out)]
            sink.write(json.dumps([rid, layer.layer_id, positions[i], *sums]) + "\n")
        sink.flush()
        return out

    DeepseekV4AttnBackend.forward = traced


def read_rows(path: Path) -> Rows:
    """The last value of every row: a rejected draft's row is followed by the right one's."""
    rows = {}
    for line in path.read_text().splitlines():
        rid, layer, position, query, output = json.loads(line)
        rows[rid, layer, position] = (query, output)
    return rows


def assert_rows_are_bit_equal(rows: Rows, reference: Rows) -> int:
    """Every row of attention that both have; returns how many."""
    both = rows.keys() & reference.keys()
    different = sorted(key for key in both if rows[key] != reference[key])
    assert not different, f"{len(different)} of {len(both)} rows differ, first {different[:3]}"
    return len(both)


def record_residuals(path: str) -> None:
    """Keep what the reducer is given and is committed.

    Seam: ``HyperDFlashWorker._append_target_hidden_to_draft_kv_by_loc``.
    """
    from sglang_hyperdflash.serving.worker import HyperDFlashWorker

    append = HyperDFlashWorker._append_target_hidden_to_draft_kv_by_loc
    rows: dict[int, torch.Tensor] = {}

    def recorded(self, *, target_hidden, positions, commit_lens=None, **rest):
        kept = torch.ones(len(positions), dtype=torch.bool)
        if commit_lens is not None:
            width = rest["cache_loc_2d"].shape[1]
            kept = (torch.arange(width) < commit_lens[:, None]).reshape(-1)
        if commit_lens is None and int(positions.min()) == 0:
            rows.clear()  # of an earlier request, or of the start
        rows.update(zip(positions[kept].tolist(), target_hidden[kept].clone(), strict=True))
        torch.save(rows, path)
        given = {"target_hidden": target_hidden, "positions": positions}
        append(self, **given, commit_lens=commit_lens, **rest)

    HyperDFlashWorker._append_target_hidden_to_draft_kv_by_loc = recorded


def install() -> None:
    """What the environment asks for."""
    if ROWS in os.environ:
        trace_rows(os.environ[ROWS])
    if RESIDUALS in os.environ:
        record_residuals(os.environ[RESIDUALS])

"""Verification is rehearsed as large as it will be; what does not fit is said, with advice."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from sglang_hyperdflash.serving.worker import HyperDFlashWorker
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


def bare(running: int | None, captured: int, mode: str = "null") -> HyperDFlashWorker:
    worker = object.__new__(HyperDFlashWorker)
    worker.block = 7
    worker._prefills_only = mode == "prefill"
    worker.model_runner = SimpleNamespace(
        max_running_requests=running, max_decode_logits_rows=lambda: 7 * captured
    )
    return worker


@pytest.mark.parametrize(
    "running, captured, mode, expected",
    [
        (256, 32, "null", 256),  # larger batches than the captured ones verify eagerly
        (8, 32, "decode", 8),
        (None, 32, "null", 32),
        (1024, 1, "prefill", 1),
    ],
)
def test_the_largest_batch_that_is_served(running, captured, mode, expected):
    assert bare(running, captured, mode)._prewarm_batch_size(7) == expected


def test_a_batch_that_does_not_fit_is_said_with_what_to_do(monkeypatch):
    def full(self):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(DFlashWorkerV2, "prewarm_sampling", full)
    with pytest.raises(HyperDFlashConfigError, match=r"512 sampled .* Lower --max-running"):
        bare(512, 32).prewarm_sampling()

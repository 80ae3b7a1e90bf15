"""Verification is rehearsed as large as it will be; a batch that does not fit ends the start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from sglang_hyperdflash.serving.worker import HyperDFlashWorker
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


def test_the_largest_batch_that_is_served_is_rehearsed(monkeypatch):
    worker = object.__new__(HyperDFlashWorker)
    worker.block = 7
    for running, captured, prefills, expected in (
        (256, 32, False, 256),  # larger batches than the captured ones verify eagerly
        (8, 32, False, 8),
        (None, 32, False, 32),
        (1024, 1, True, 1),
    ):
        worker._prefills_only = prefills
        worker.model_runner = SimpleNamespace(
            max_running_requests=running, max_decode_logits_rows=lambda rows=7 * captured: rows
        )
        assert worker._prewarm_batch_size(7) == expected

    def full(self):
        raise torch.OutOfMemoryError

    monkeypatch.setattr(DFlashWorkerV2, "prewarm_sampling", full)
    worker._prefills_only = False
    with pytest.raises(HyperDFlashConfigError, match="--max-running"):
        worker.prewarm_sampling()

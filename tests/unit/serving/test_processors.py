"""Batches with a custom logit processor: one row per request, after the last round's result."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.serving import sampling_seams, width_worker
from sglang_hyperdflash.serving.width_worker import WidthWorker
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


def test_a_processor_takes_one_row_though_a_block_would_fit():
    worker = object.__new__(WidthWorker)
    runner = SimpleNamespace(model_config=SimpleNamespace(context_len=100))
    worker._target_worker = SimpleNamespace(model_runner=runner)
    worker.block, worker._has_one_row, worker._overlap, worker._rounds_width = 7, True, True, 7
    request = SimpleNamespace(kv=SimpleNamespace(kv_committed_len=9))
    worker.requests = SimpleNamespace(reqs=[request])
    worker._info = SimpleNamespace(has_custom_logit_processor=False)
    assert not worker._needs_one_row()
    worker._info.has_custom_logit_processor = True
    assert worker._needs_one_row()


def test_a_server_of_whole_blocks_refuses_processors_at_start():
    width_worker.check_processors(has_one_row=True, enabled=True)
    width_worker.check_processors(has_one_row=False, enabled=False)
    with pytest.raises(HyperDFlashConfigError, match="--enable-custom-logit-processor: expected"):
        width_worker.check_processors(has_one_row=False, enabled=True)


@pytest.mark.parametrize(
    ("algorithm", "processors", "pending", "expected"),
    [
        (ALGORITHM, True, [1], True),
        (ALGORITHM, True, [], False),
        (ALGORITHM, False, [1], False),
        ("DFLASH", True, [1], False),
    ],
)
def test_results_are_processed_before_a_round_with_a_processor(
    algorithm, processors, pending, expected
):
    scheduler = SimpleNamespace(result_queue=pending)
    batch = SimpleNamespace(
        spec_algorithm=SimpleNamespace(name=algorithm),
        sampling_info=SimpleNamespace(has_custom_logit_processor=processors),
    )
    first = sampling_seams.process_results_first
    assert first(False, scheduler, batch, None) is expected
    assert first(True, scheduler, batch, None) is True
    assert first(False, scheduler, None, batch) is False

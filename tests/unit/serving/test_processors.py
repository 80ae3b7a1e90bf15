"""Batches with a custom logit processor: one row per request, after the last round's result."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_hyperdflash import ALGORITHM
from sglang_hyperdflash.serving.startup.pair import check_processors
from sglang_hyperdflash.serving.verification.prefill import process_results_first
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError


def test_a_server_of_whole_blocks_refuses_processors_at_start():
    check_processors(width_1_allowed=True, enabled=True)
    check_processors(width_1_allowed=False, enabled=False)
    with pytest.raises(HyperDFlashConfigError, match="--enable-custom-logit-processor: expected"):
        check_processors(width_1_allowed=False, enabled=True)


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
    first = process_results_first
    assert first(False, scheduler, batch, None) is expected
    assert first(True, scheduler, batch, None) is True
    assert first(False, scheduler, None, batch) is False

"""What a scheduler learns from a round, and the metrics that no engine test reads exactly."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge

from sglang_hyperdflash.serving.scheduler import metrics
from sglang_hyperdflash.serving.scheduler.metrics import GAIN, SECONDS, Metrics, count_round
from sglang_hyperdflash.serving.width.policy import CostTable, WidthController
from sglang_hyperdflash.serving.width.settings import WidthSetting

LABELS = {"model_name": "tiny", "tp_rank": "0"}


@pytest.fixture
def control() -> WidthController:
    return WidthController(WidthSetting("adaptive", (1, 2, 4, 7)), 7)


def request(finished: bool = False, retracted: bool = False, top_k: int = 1) -> SimpleNamespace:
    return SimpleNamespace(
        finished=lambda: finished,
        is_retracted=retracted,
        sampling_params=SimpleNamespace(top_k=top_k),
    )


def test_the_policy_learns_from_running_requests_without_metrics(control, monkeypatch):
    monkeypatch.setattr(metrics, "_metrics", None)
    reqs = [request(), request(top_k=50), request(finished=True), request(retracted=True)]
    batch = SimpleNamespace(reqs=reqs, spec_algorithm=SimpleNamespace(name="HYPERDFLASH"))
    result = SimpleNamespace(
        num_correct_drafts_per_req_cpu=[6, 0, 6, 6], speculative_num_draft_tokens=7
    )
    processor = SimpleNamespace(model_worker=SimpleNamespace(width_control=control))
    assert count_round([[1]], processor, result, batch) is None
    greedy, sampled = control.policy.classes
    assert greedy.successes == [1.0] * 6
    assert sampled.trials == [1.0] + [0.0] * 5 and sampled.successes == [0.0] * 6


def test_the_start_s_round_times_and_the_gain_are_exported(control):
    control.policy.costs = CostTable((1, 2, 4, 7))
    control.policy.costs.add(1, [1.0, 1.1, 1.2, 1.4, 2.0, 2.1, 2.2, 2.4])
    registry = CollectorRegistry()
    kinds = (partial(kind, registry=registry) for kind in (Counter, Gauge))
    exported, value = Metrics(LABELS, control, *kinds), registry.get_sample_value
    for sampled, seconds in (("false", 1.4), ("true", 2.4)):
        cell = {"requests": "1", "width": "7", "sampled": sampled}
        assert value(SECONDS, LABELS | cell) == seconds
    assert value(GAIN, LABELS) is None, "no round has shown any"
    assert control.next(1, 0) == 7
    exported.add([6], 7)
    # Every draft is thought to be accepted at a rate of 0.8 until one has been.
    assert value(GAIN, LABELS) == pytest.approx(sum(0.8**k for k in range(7)) / 1.4)

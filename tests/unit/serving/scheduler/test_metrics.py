"""What a scheduler counts, and the dashboard that shows it."""

import json
from collections import deque
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from prometheus_client import CollectorRegistry, Counter, Gauge

from sglang_hyperdflash.serving.record.settings import REASONS
from sglang_hyperdflash.serving.scheduler import metrics
from sglang_hyperdflash.serving.scheduler.metrics import ACCEPTED, DRAFTED, ROUNDS, start_counting
from sglang_hyperdflash.serving.settings import WidthSetting
from sglang_hyperdflash.serving.width.policy import CostTable, WidthController
from sglang_hyperdflash.serving.worker import UNKNOWN, HyperDFlashWorker, Round
from tests.conftest import ROOT

LABELS = {"model_name": "tiny", "tp_rank": 0}


class Request(SimpleNamespace):
    __hash__ = object.__hash__


def request(finished: bool = False, retracted: bool = False, top_k: int = 1):
    fields = {"is_retracted": retracted, "sampling_params": SimpleNamespace(top_k=top_k)}
    return Request(finished=lambda: finished, **fields)


class Scheduler:
    """As far as it is read; its result processor has the same attributes."""

    def __init__(self, algorithm: str = "HYPERDFLASH", enabled: bool = True) -> None:
        self.registry = CollectorRegistry()
        counter, gauge = (partial(kind, registry=self.registry) for kind in (Counter, Gauge))
        kinds = {"_counter_cls": counter, "_gauge_cls": gauge}
        self.metrics_collector = SimpleNamespace(labels=LABELS, **kinds)
        self.spec_algorithm = SimpleNamespace(name=algorithm)
        self.control = WidthController(WidthSetting("adaptive", (1, 2, 4, 7)), 7)
        parts = {"width_control": self.control, "recorder": None, "metrics": None}
        self.model_worker = SimpleNamespace(rounds=deque(), block=7, _kinds={}, **parts)
        self.metrics_reporter = SimpleNamespace(current_scheduler_metrics_enabled=enabled)

    def round(self, accepted: list[int], width=7, reqs: list | None = None, **more: Any) -> None:
        """Launch a round, and let SGLang process its result."""
        reqs = reqs or [request() for _ in accepted]
        classes = [int(req.sampling_params.top_k > 1) for req in reqs]
        self.model_worker.rounds.append(Round(reqs, width, classes, **more))
        HyperDFlashWorker.on_verify_complete_cpu(self.model_worker, accepted)

    def value(self, name: str, **labels) -> float | None:
        """A series as a scrape sees it."""
        given = {label: str(value) for label, value in (LABELS | labels).items()}
        return self.registry.get_sample_value(name, given)

    def positions(self, name: str) -> list[float]:
        return [self.value(name, position=k) for k in range(1, 7)]


def test_rounds_are_counted_by_position_and_width():
    """Every series is there from the start; finished and retracted requests are left out."""
    one = Scheduler()
    start_counting(None, one)
    assert [one.value(ROUNDS), one.value(metrics.DRAFTER), *one.positions(ACCEPTED)] == [0] * 8
    one.round([0, 0], width=1)
    one.round([1, 0, 1], width=2)
    one.round([3, 6, 6], 4, [request(), request(finished=True), request(retracted=True)])
    one.round([0, 2, 6])
    one.round([6], 7, [request(finished=True)])
    assert one.value(ROUNDS) == 2 + 3 + 1 + 3
    assert one.positions(DRAFTED) == [3 + 1 + 3, 4, 4, 3, 3, 3]
    assert one.positions(ACCEPTED) == [5, 3, 2, 1, 1, 1]
    assert sum(one.positions(ACCEPTED)) == 1 + 1 + 3 + 2 + 6, "tau's numerator"
    assert [one.value(metrics.WIDTH_ROUNDS, width=w) for w in (1, 2, 4, 7)] == [1, 1, 1, 2]
    assert one.value(metrics.WIDTH_NOW) == 7


def test_copies_are_counted_and_kinds_of_match_are_known_a_round_later():
    """Two rounds in a row without a match are a request that copies nothing."""
    one, reqs = Scheduler(), [request(), request(top_k=50)]
    start_counting(None, one)
    for copies, greedy, sampled in (
        ([[0, 0], [4, 6]], UNKNOWN, 4),
        ([[1, 3], [0, 2]], 1, UNKNOWN),
        ([[0, 0], [0, 0]], UNKNOWN, 0),
        ([[0, 0], [0, 0]], 0, 0),
        ([[0, 0], [2, 0]], 0, 2),
    ):
        one.round([1, 6], reqs=reqs, copies=torch.tensor(copies))
        classes = [HyperDFlashWorker._class_of(one.model_worker, req) for req in reqs]
        assert classes == [greedy, UNKNOWN + 1 + sampled]
    assert [one.value(n) for n in (metrics.COPIED, metrics.COPIES_ACCEPTED)] == [11, 9]


@pytest.mark.parametrize("algorithm, enabled", [("HYPERDFLASH", False), ("DFLASH", True)])
def test_without_metrics_and_for_other_algorithms_nothing_is_exported(algorithm, enabled):
    one = Scheduler(algorithm, enabled)
    start_counting(None, one)
    assert list(one.registry.collect()) == [] and one.model_worker.metrics is None


def test_the_policy_learns_from_rounds_of_the_drafter_in_use_each_of_its_own_width():
    """With overlap the next round is launched, maybe with another width, before a result comes."""
    one = Scheduler(enabled=False)
    reqs = [request(), request(top_k=50), request(finished=True)]
    one.model_worker.rounds += [
        Round(reqs, 7, [0, 1, 0]),
        Round([request()], 2, [0]),
        Round(reqs, 7, [0, 1, 0], observed=False),
    ]
    for accepted in ([6, 0, 6], [1], [0, 0, 0]):
        HyperDFlashWorker.on_verify_complete_cpu(one.model_worker, accepted)
    greedy, sampled = one.control.policy.classes
    assert greedy.successes[1:] == [1.0] * 5 and 1.9 < greedy.successes[0] < 2.0
    assert sampled.trials == [1.0] + [0.0] * 5 and sampled.successes == [0.0] * 6


def test_a_server_that_records_counts_what_it_stores_and_what_it_sheds():
    one = Scheduler()
    one.model_worker.recorder = SimpleNamespace(counters={})
    start_counting(None, one)
    for name in ("requests", "bytes", *REASONS):
        one.model_worker.recorder.counters[name].inc(len(name))
    assert one.value(metrics.RECORDED) == 8 and one.value(metrics.RECORDED_BYTES) == 5
    assert [one.value(metrics.SHED, reason=reason) for reason in REASONS] == [*map(len, REASONS)]


def test_the_start_s_round_times_and_the_gain_are_exported():
    one, costs = Scheduler(), CostTable((1, 2, 4, 7))
    costs.add(1, [1.0, 1.1, 1.2, 1.4, 2.0, 2.1, 2.2, 2.4])
    one.control.policy.costs = costs
    start_counting(None, one)
    for sampled, seconds in (("false", 1.4), ("true", 2.4)):
        assert one.value(metrics.SECONDS, requests=1, width=7, sampled=sampled) == seconds
    assert one.value(metrics.GAIN) is None, "no round has shown any"
    one.control.next(1, 0)
    one.round([6])
    gain = one.value(metrics.GAIN)
    assert gain == pytest.approx(one.control.predicted_gain()) and gain > 1


def test_every_panel_of_the_dashboard_asks_the_data_source_that_is_chosen():
    """``test_docs.py`` looks for the metrics that it asks for."""
    panels = json.loads((ROOT / "docs" / "grafana_hyperdflash.json").read_text())["panels"]
    targets = [target for panel in panels for target in panel["targets"]]
    asked = " ".join(target["expr"] for target in targets)
    assert all(name in asked for name in (ROUNDS, ACCEPTED, "sglang:gen_throughput"))
    assert all(each["datasource"]["uid"] == "${datasource}" for each in [*panels, *targets])
    assert len({panel["id"] for panel in panels}) == len(panels)

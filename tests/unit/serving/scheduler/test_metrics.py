"""Counting accepted positions, and that the dashboard asks for metrics which exist."""

from __future__ import annotations

import inspect
import json
import re
from functools import partial
from types import SimpleNamespace

import pytest

from sglang_hyperdflash.serving.record.settings import REASONS
from sglang_hyperdflash.serving.scheduler import follow, metrics
from sglang_hyperdflash.serving.scheduler.metrics import (
    ACCEPTED,
    DRAFTED,
    FAMILIES,
    GAIN,
    POSITION,
    REASON,
    RECORDED,
    RECORDED_BYTES,
    REQUESTS,
    ROUNDS,
    SAMPLED,
    SECONDS,
    SHED,
    WIDTH,
    WIDTH_NOW,
    WIDTH_ROUNDS,
    Metrics,
    count_an_answers_drafts,
    count_round,
    rate_what_was_drafted,
    start_counting,
)
from sglang_hyperdflash.serving.width.policy import CostTable, WidthController
from sglang_hyperdflash.serving.width.settings import WidthSetting
from tests.conftest import ROOT

LABELS = {"model_name": "tiny", "engine_type": "unified", "tp_rank": 0}
DASHBOARD = ROOT / "docs" / "grafana_hyperdflash.json"


class FakeCounter:
    """prometheus_client's Counter, as far as it is used; what was counted is in ``values``."""

    values: dict[tuple, float]

    def __init__(self, name, documentation, labelnames, key=(), multiprocess_mode="all"):
        self.name, self.labelnames, self.key = name, labelnames, key

    def labels(self, **labels):
        assert list(labels) == list(self.labelnames)
        own = labels.get(POSITION) or labels.get(WIDTH) or labels.get(REASON)
        if REQUESTS in labels:
            own = labels[REQUESTS], labels[WIDTH], labels[SAMPLED]
        child = type(self)(self.name, "", self.labelnames, (self.name, own))
        self.values.setdefault(child.key, 0)
        return child

    def inc(self, amount=1):
        self.values[self.key] += amount

    def set(self, value):
        self.values[self.key] = value


@pytest.fixture
def counter(monkeypatch):
    """A counter class of this test's own, and a process that has counted nothing."""
    monkeypatch.setattr(metrics, "_metrics", None)
    return type("Counted", (FakeCounter,), {"values": {}})


def request(finished: bool = False, retracted: bool = False, top_k: int = 1):
    return SimpleNamespace(
        finished=lambda: finished,
        is_retracted=retracted,
        sampling_params=SimpleNamespace(top_k=top_k),
    )


def adaptive() -> WidthController:
    return WidthController(WidthSetting("adaptive", (1, 2, 4, 7)), 7)


def scheduler(counter, algorithm="HYPERDFLASH", enabled=True, control=None, recorder=None):
    """As far as it is read; its result processor has the same attributes."""
    return SimpleNamespace(
        spec_algorithm=SimpleNamespace(name=algorithm),
        model_worker=SimpleNamespace(width_control=control or adaptive(), recorder=recorder),
        metrics_collector=SimpleNamespace(labels=LABELS, _counter_cls=counter, _gauge_cls=counter),
        metrics_reporter=SimpleNamespace(current_scheduler_metrics_enabled=enabled),
    )


def one_round(
    counter, accepted, reqs=None, algorithm="HYPERDFLASH", enabled=True, width=7, control=None
):
    reqs = reqs or [request() for _ in accepted]
    processor = scheduler(counter, algorithm, enabled, control)
    if metrics._metrics is None:
        assert start_counting(None, processor) is None
    batch = SimpleNamespace(reqs=reqs, spec_algorithm=SimpleNamespace(name=algorithm))
    result = SimpleNamespace(
        num_correct_drafts_per_req_cpu=accepted, speculative_num_draft_tokens=width
    )
    assert count_round([[1]], processor, result, batch) is None


def positions(counter) -> list[float]:
    return [counter.values[ACCEPTED, str(k)] for k in range(1, 7)]


def test_a_round_reaches_every_position_up_to_its_length(counter):
    one_round(counter, [0, 2, 6])
    one_round(counter, [1])
    assert counter.values[ROUNDS, None] == 4
    assert positions(counter) == [3, 2, 1, 1, 1, 1]
    # tau's numerator: the accepted drafts of all rounds.
    assert sum(positions(counter)) == 0 + 2 + 6 + 1


def test_a_server_that_records_counts_what_it_stores_and_what_it_sheds(counter):
    recorder = SimpleNamespace(counters={})
    start_counting(None, scheduler(counter))
    assert not {RECORDED, RECORDED_BYTES, SHED} & {name for name, _ in counter.values}
    start_counting(None, scheduler(counter, recorder=recorder))
    assert {reason for name, reason in counter.values if name == SHED} == set(REASONS)
    for name in ("requests", "bytes", *REASONS):
        recorder.counters[name].inc(len(name))
    assert counter.values[RECORDED, None] == 8 and counter.values[RECORDED_BYTES, None] == 5
    assert [counter.values[SHED, reason] for reason in REASONS] == [*map(len, REASONS)]


def test_the_first_result_s_width_does_not_size_the_counters(counter):
    one_round(counter, [0], width=1)
    one_round(counter, [6, 2])
    assert positions(counter) == [2, 2, 1, 1, 1, 1]


def test_narrow_rounds_count_the_positions_they_drafted(counter):
    one_round(counter, [0, 0], width=1)
    one_round(counter, [1, 0, 1], width=2)
    one_round(counter, [3], width=4)
    one_round(counter, [6])
    assert counter.values[ROUNDS, None] == 7
    drafted = [counter.values[DRAFTED, str(k)] for k in range(1, 7)]
    assert drafted == [5, 2, 2, 1, 1, 1]
    assert positions(counter) == [4, 2, 2, 1, 1, 1]
    assert [counter.values[WIDTH_ROUNDS, str(w)] for w in (1, 2, 4, 7)] == [1, 1, 1, 1]
    assert counter.values[WIDTH_NOW, None] == 7


def test_the_policy_learns_what_is_counted_by_class(counter):
    control = adaptive()
    reqs = [request(), request(top_k=50), request(finished=True)]
    one_round(counter, [6, 0, 6], reqs, enabled=False, control=control)
    greedy, sampled = control.policy.classes
    assert greedy.successes == [1.0] * 6 and sampled.successes == [0.0] * 6
    assert sampled.trials == [1.0] + [0.0] * 5


def test_positions_equal_the_tail_sums_of_sglang_s_histogram(counter):
    from sglang.srt.managers.schedule_batch import Req

    accepted = [3, 0, 6, 1, 1, 5, 2, 0, 3]
    req = SimpleNamespace(spec_correct_drafts_histogram=[])
    for length in accepted:
        Req.update_spec_correct_drafts_histogram(req, length)
        one_round(counter, [length])
    histogram = req.spec_correct_drafts_histogram
    assert counter.values[ROUNDS, None] == sum(histogram)
    assert positions(counter) == [sum(histogram[k:]) for k in range(1, 7)]


def test_every_version_of_the_drafter_has_series_of_its_own(counter, monkeypatch):
    versions = {}

    def labels(self, **given):
        child = FakeCounter.labels(self, **given)
        if "version" in given:
            child.key = (*child.key, given["version"])
            versions.setdefault(child.key, 0)
        return child

    monkeypatch.setattr(counter, "labels", labels)
    monkeypatch.setattr(counter, "values", versions)
    one_round(counter, [0, 2])
    monkeypatch.setattr(follow, "version", lambda: 3)
    one_round(counter, [6], width=4)
    assert [versions[ROUNDS, None, v] for v in ("0", "3")] == [2, 1]
    assert [versions[DRAFTED, "5", v] for v in ("0", "3")] == [2, 0]
    assert [versions[ACCEPTED, "1", v] for v in ("0", "3")] == [1, 1]


def test_finished_and_retracted_requests_are_left_out(counter):
    reqs = [request(finished=True), request(), request(retracted=True)]
    one_round(counter, [6, 1, 6], reqs)
    assert counter.values[ROUNDS, None] == 1
    assert positions(counter) == [1, 0, 0, 0, 0, 0]


def test_every_series_is_there_before_the_first_round(counter):
    start_counting(None, scheduler(counter))
    assert counter.values[ROUNDS, None] == 0
    assert positions(counter) == [0] * 6


def test_nothing_is_exported_without_metrics_or_for_other_algorithms(counter):
    for other in (scheduler(counter, enabled=False), scheduler(counter, algorithm="DFLASH")):
        start_counting(None, other)
    assert counter.values == {}


def test_a_batch_with_nothing_to_count_counts_nothing(counter):
    one_round(counter, [6], [request(finished=True)])
    assert counter.values[ROUNDS, None] == 0
    assert positions(counter) == [0] * 6


@pytest.mark.parametrize("algorithm", ["EAGLE", "DFLASH", "DSPARK"])
def test_other_algorithms_are_not_counted(counter, algorithm):
    one_round(counter, [3], algorithm=algorithm)
    assert counter.values == {} and metrics._metrics is None


def test_nothing_is_counted_or_created_without_metrics(counter):
    one_round(counter, [3], enabled=False)
    assert counter.values == {} and metrics._metrics is None


@pytest.mark.parametrize(
    ("algorithm", "proposed"), [("HYPERDFLASH", 12 * 0 + 3 * 3 + 2 * 6), ("DSPARK", 17 * 6)]
)
def test_accept_rates_count_the_drafts_that_were_made(monkeypatch, algorithm, proposed):
    """Of 12 rounds of width 1, 3 of 4 and 2 of 7: of an answer, and of a log interval."""
    from sglang.srt.managers import tokenizer_manager
    from sglang.srt.managers.scheduler_components import metrics_reporter

    spec, rounds = (
        SimpleNamespace(speculative_num_draft_tokens=7),
        ((12, 1, 0), (3, 4, 2), (2, 7, 4)),
    )
    for module in (tokenizer_manager, metrics_reporter):
        monkeypatch.setattr(module, "get_spec", lambda: spec)
    correct = sum(n * accepted for n, _, accepted in rounds)
    sent = SimpleNamespace(
        spec_verify_ct=[17],
        spec_num_correct_drafts=[correct],
        spec_num_cap_tokens=[sum(n * width for n, width, _ in rounds)],
        spec_correct_drafts_histogram=None,
        completion_tokens=[17 + correct],
    )
    manager = SimpleNamespace(server_args=SimpleNamespace(speculative_algorithm=algorithm))
    original = inspect.unwrap(tokenizer_manager.TokenizerManager._calculate_spec_decoding_metrics)
    meta: dict = {}
    assert count_an_answers_drafts(original(manager, meta, sent, 0), manager, meta, sent, 0) is None
    assert meta["spec_num_proposed_drafts"] == proposed
    assert meta["spec_accept_rate"] == pytest.approx(correct / proposed)

    reporter = SimpleNamespace(scheduler=scheduler(None, algorithm))
    reporter.scheduler.model_worker.block = 7
    names = ("accept_tokens", "correct_drafts", "forward_ct", "block_accept_tokens", "cap_tokens")
    for name in names:
        setattr(reporter, f"spec_num_{name}", 0)
    original = inspect.unwrap(metrics_reporter.SchedulerMetricsReporter.update_spec_metrics)
    for n, width, accepted in rounds:
        given = (n, n * accepted, n * (accepted + 1), 0, n * width)
        assert rate_what_was_drafted(original(reporter, *given), reporter, *given) is None
    # What SGLang will export.
    rate = reporter.spec_num_correct_drafts / (reporter.spec_num_forward_ct * 6)
    assert rate == pytest.approx(correct / proposed)


def test_the_start_s_round_times_and_the_gain_are_exported(counter):
    control, costs = adaptive(), CostTable((1, 2, 4, 7))
    costs.add(1, [1.0, 1.1, 1.2, 1.4, 2.0, 2.1, 2.2, 2.4])
    control.policy.costs = costs
    start_counting(None, scheduler(counter, control=control))
    cells = {key[1]: value for key, value in counter.values.items() if key[0] == SECONDS}
    assert len(cells) == 8
    assert cells[1, 7, "false"] == 1.4 and cells[1, 7, "true"] == 2.4
    assert (GAIN, None) not in counter.values  # no round has shown any
    control.next(1, 0)
    one_round(counter, [6], control=control)
    assert counter.values[GAIN, None] == pytest.approx(control.predicted_gain())
    assert control.predicted_gain() > 1


def test_the_families_are_prometheus_ones_by_default():
    """Names, labels and zeroes as a scrape sees them."""
    from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest

    registry = CollectorRegistry()
    kinds = (partial(kind, registry=registry) for kind in (Counter, Gauge))
    Metrics(LABELS, adaptive(), *kinds).add([2], 7)
    text = generate_latest(registry).decode()
    labels = 'engine_type="unified",model_name="tiny"'
    assert f'{ROUNDS}{{{labels},tp_rank="0",version="0"}} 1.0' in text
    assert f'{WIDTH_NOW}{{{labels},tp_rank="0"}} 7.0' in text
    for position, value in enumerate([1, 1, 0, 0, 0, 0], start=1):
        own = f'{labels},position="{position}",tp_rank="0",version="0"'
        assert f"{ACCEPTED}{{{own}}} {value}.0" in text


def sglang_metrics() -> set[str]:
    """Names in the source of SGLang's collectors."""
    from sglang.srt.observability import metrics_collector

    return set(re.findall(r'name="(sglang:\w+)"', inspect.getsource(metrics_collector)))


def metrics_in(text: str) -> set[str]:
    """Families that a text asks for; a histogram's samples go by its name."""
    names = re.findall(r"\b(?:sglang|hyperdflash):\w+", text)
    return {re.sub(r"_(bucket|sum|count)$", "", name) for name in names}


def expressions(dashboard: dict) -> list[str]:
    panels = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    variables = [v["definition"] for v in dashboard["templating"]["list"] if v["type"] == "query"]
    return panels + variables


def test_the_dashboard_asks_for_metrics_that_exist():
    dashboard = json.loads(DASHBOARD.read_text())
    found = metrics_in("\n".join(expressions(dashboard)))
    assert {ROUNDS, ACCEPTED, "sglang:gen_throughput", "sglang:num_queue_reqs"} <= found
    assert found <= sglang_metrics() | set(FAMILIES)
    for expression in expressions(dashboard):
        assert all(expression.count(a) == expression.count(b) for a, b in ("()", "{}", "[]"))


def test_the_dashboard_can_be_imported():
    dashboard = json.loads(DASHBOARD.read_text())
    assert dashboard["schemaVersion"] >= 39 and dashboard["title"]
    variables = {variable["name"] for variable in dashboard["templating"]["list"]}
    assert {"datasource", "model_name", "instance"} == variables
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 5
    for panel in panels:
        sources = [panel["datasource"], *(target["datasource"] for target in panel["targets"])]
        assert all(source["uid"] == "${datasource}" for source in sources)
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24

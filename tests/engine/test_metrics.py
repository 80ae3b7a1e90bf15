"""The server's own ``/metrics`` against the histograms of its answers."""

from __future__ import annotations

import json
import re

import requests

from sglang_hyperdflash.serving.scheduler.metrics import (
    ACCEPTED,
    GAIN,
    POSITION,
    ROUNDS,
)
from tests.conftest import ROOT
from tests.engine.conftest import greedy_all
from tests.waiting import PATIENCE

DRAFTS = 6


def samples(server, family: str) -> dict[frozenset, float]:
    """The samples of one counter family by their labels."""
    from prometheus_client.parser import text_string_to_metric_families

    answer = requests.get(f"{server.url}/metrics", timeout=PATIENCE)
    answer.raise_for_status()
    return {
        frozenset(sample.labels.items()): sample.value
        for metric in text_string_to_metric_families(answer.text)
        for sample in metric.samples
        if sample.name == family
    }


def counts(server) -> tuple[float, list[float]]:
    """Rounds, and accepted drafts by position."""
    rounds, accepted = samples(server, ROUNDS), samples(server, ACCEPTED)
    by_position = {dict(labels)[POSITION]: value for labels, value in accepted.items()}
    assert len(rounds) == 1 and len(by_position) == len(accepted)
    return next(iter(rounds.values())), [by_position[str(k)] for k in range(1, DRAFTS + 1)]


def missing_from_dashboard(server) -> set[str]:
    """Metrics that the dashboard draws and this server does not show (yet)."""
    dashboard = json.loads((ROOT / "docs" / "grafana_hyperdflash.json").read_text())
    drawn = " ".join(t["expr"] for panel in dashboard["panels"] for t in panel["targets"])
    shown = requests.get(f"{server.url}/metrics", timeout=PATIENCE).text
    return {
        name
        for name in re.findall(r"\b(?:sglang|hyperdflash):\w+", drawn)
        if not re.search(rf"^{name}{{", shown, re.MULTILINE)
    }


def test_positions_equal_the_answers_histograms(hyper_server, own_prompts):
    # The launch's warm-up request has created the series, and counts.
    rounds_before, accepted_before = counts(hyper_server)
    answers = greedy_all(hyper_server, own_prompts[:8], 4)
    rounds, accepted = counts(hyper_server)
    histograms = [a["meta_info"]["spec_correct_drafts_histogram"] for a in answers]
    assert rounds - rounds_before == sum(map(sum, histograms))
    assert [now - then for now, then in zip(accepted, accepted_before, strict=True)] == [
        sum(sum(histogram[k:]) for histogram in histograms) for k in range(1, DRAFTS + 1)
    ]
    meta = [answer["meta_info"] for answer in answers]
    assert sum(accepted) - sum(accepted_before) == sum(m["spec_num_correct_drafts"] for m in meta)
    assert rounds - rounds_before == sum(m["spec_verify_ct"] for m in meta)


def test_labels_are_sglangs_and_the_dashboards_metrics_exist(hyper_server):
    sglangs = set().union(*samples(hyper_server, "sglang:num_running_reqs"))
    ours = set().union(*samples(hyper_server, ROUNDS))
    # And the version of the drafter that the server started with.
    assert ours == sglangs | {("version", "0")}
    # A server of one width expects no gain; tests/engine/test_width.py sees it.
    expected = {"sglang:num_retracted_requests_total", GAIN}
    assert missing_from_dashboard(hyper_server) <= expected

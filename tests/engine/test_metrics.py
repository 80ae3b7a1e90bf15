"""The server's own ``/metrics`` against the histograms of its answers."""

from __future__ import annotations

import json
import re

import pytest
import requests

from sglang_hyperdflash.serving.scheduler.metrics import ACCEPTED, GAIN, POSITION, ROUNDS
from tests.conftest import ROOT
from tests.engine.asking import by_label, samples
from tests.engine.conftest import greedy_all
from tests.waiting import PATIENCE

pytestmark = pytest.mark.xdist_group("pair")
DRAFTS = 6


def counts(server) -> tuple[float, list[float]]:
    """Rounds, and accepted drafts by position."""
    (rounds,), accepted = samples(server, ROUNDS).values(), by_label(server, ACCEPTED, POSITION)
    return rounds, [accepted[str(k)] for k in range(1, DRAFTS + 1)]


def test_positions_equal_the_answers_histograms(hyper_server, own_prompts):
    # The launch's warm-up request has created the series, and counts.
    rounds_before, accepted_before = counts(hyper_server)
    meta = [answer["meta_info"] for answer in greedy_all(hyper_server, own_prompts[:8], 4)]
    rounds, accepted = counts(hyper_server)
    histograms = [one["spec_correct_drafts_histogram"] for one in meta]
    assert rounds - rounds_before == sum(map(sum, histograms))
    assert [now - then for now, then in zip(accepted, accepted_before, strict=True)] == [
        sum(sum(histogram[k:]) for histogram in histograms) for k in range(1, DRAFTS + 1)
    ]
    assert sum(accepted) - sum(accepted_before) == sum(m["spec_num_correct_drafts"] for m in meta)
    assert rounds - rounds_before == sum(m["spec_verify_ct"] for m in meta)


def test_labels_are_sglangs_and_the_dashboards_metrics_exist(hyper_server):
    sglangs = set().union(*samples(hyper_server, "sglang:num_running_reqs"))
    # And the version of the drafter that the server started with.
    assert set().union(*samples(hyper_server, ROUNDS)) == sglangs | {("version", "0")}
    dashboard = json.loads((ROOT / "docs" / "grafana_hyperdflash.json").read_text())
    drawn = " ".join(t["expr"] for panel in dashboard["panels"] for t in panel["targets"])
    shown = requests.get(f"{hyper_server.url}/metrics", timeout=PATIENCE).text
    names = set(re.findall(r"\b(?:sglang|hyperdflash):\w+", drawn))
    missing = {name for name in names if not re.search(rf"^{name}{{", shown, re.MULTILINE)}
    # A server of one width expects no gain, and none was retracted.
    assert missing <= {"sglang:num_retracted_requests_total", GAIN}

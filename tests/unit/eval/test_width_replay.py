"""The replay over published round times: its costs, its speeds by hand, the committed report."""

from __future__ import annotations

import json

import pytest

from eval import width_replay
from eval.width_replay import DRAFT_MS, VERIFY_MS, WIDTHS, acceptances, published, report, steady
from tests.conftest import ROOT

TINY = json.loads((ROOT / "eval/results/tiny/results.json").read_bytes())
FOLDER = ROOT / "eval/results/v4_width"
COMMITTED = json.loads((FOLDER / "results.json").read_bytes())


def test_a_round_is_a_verification_and_a_draft_pass():
    assert published(1, 1) == pytest.approx(0.00511)
    assert published(64, 4) == pytest.approx(0.0113 + 0.00227)
    assert all(n * w in VERIFY_MS for n in DRAFT_MS for w in WIDTHS)


def test_acceptance_is_that_of_all_rounds():
    rows = [r for r in TINY["rows"] if r["method"] == "hyperdflash2" and r["temperature"] == 0.0]
    rounds = sum(row["verify_rounds"] for row in rows)
    tau = sum(row["tau"] * row["verify_rounds"] for row in rows) / rounds
    assert 1 + sum(acceptances(TINY)["all texts, temperature 0"]) == pytest.approx(tau)


def test_a_steady_load_is_compared_with_the_best_width(monkeypatch):
    monkeypatch.setattr(width_replay, "ROUNDS", 2)
    monkeypatch.setattr(width_replay, "widths_chosen", lambda *_: [1, 4])
    found = steady([0.5, 0.4, 0.3, 0, 0, 0], 64)
    base, narrow, four, seven = 1 / 7.9, 1.5 / 11.7, 2.2 / 13.57, 2.2 / 17.94
    fixed = {1: 1.0, 2: narrow / base, 4: four / base, 7: seven / base}
    assert found["fixed"] == pytest.approx(fixed, abs=1e-3)
    assert found["adaptive"] == pytest.approx(3.2 / (7.9 + 13.57) / base, abs=1e-3)
    assert found["over_the_best"] == pytest.approx(3.2 / (7.9 + 13.57) / four, abs=1e-3)
    assert found["rounds"] == {1: 0.5, 4: 0.5}


@pytest.mark.parametrize("requests", [1, 8])
def test_the_committed_numbers_are_what_the_policy_does_now(requests):
    for name, survives in acceptances(TINY).items():
        rows = COMMITTED["kinds"][name]["steady"]
        expected = next(row for row in rows if row["requests"] == requests)
        assert json.loads(json.dumps(steady(survives, requests))) == expected


def test_the_policy_stays_near_the_best_width_as_the_page_says():
    """docs/benchmarking.md quotes both numbers."""
    rows = [row for kind in COMMITTED["kinds"].values() for row in kind["steady"]]
    assert min(row["over_the_best"] for row in rows if row["requests"] != 128) > 0.99
    assert min(row["over_the_best"] for row in rows) == pytest.approx(0.93, abs=0.005)
    assert min(kind["stepped"] for kind in COMMITTED["kinds"].values()) > 0.99


def test_the_committed_report_is_of_these_numbers():
    kinds = json.loads(json.dumps(COMMITTED["kinds"]))
    for kind in kinds.values():
        for row in kind["steady"]:
            for name in ("fixed", "rounds"):
                row[name] = {int(w): value for w, value in row[name].items()}
    assert report(kinds) == (FOLDER / "report.md").read_text()

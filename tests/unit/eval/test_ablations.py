"""The ablation driver's variants, measurements and report."""

from __future__ import annotations

import json

import pytest

from tests.conftest import EXAMPLE


@pytest.fixture
def ablations(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import ablations

    return ablations


def test_variants_differ_in_one_choice(ablations):
    base = ablations.VARIANTS["baseline"]
    names = {"shape": vars(base.shape), "objective": base.objective.__struct_fields__}
    changed = {
        name: {
            field
            for part in ("shape", "objective")
            for field in names[part]
            if getattr(getattr(variant, part), field) != getattr(getattr(base, part), field)
        }
        | ({"random_gate"} if variant.random_gate else set())
        for name, variant in ablations.VARIANTS.items()
    }
    assert changed == {
        "baseline": set(),
        "random gate": {"random_gate"},
        "fc": {"reducer"},
        "no KL": {"alpha"},
        "mean teacher": {"teacher"},
        "no path norm": {"path_norm"},
        "layers 1, 3, 5, fc": {"reducer", "source", "layer_ids"},
    }


def test_the_report_asks_for_variants_that_are_made(ablations):
    from ablations_report import AXES

    assert {name for rows in AXES.values() for name, _ in rows} == set(ablations.VARIANTS)


def answer(ids: list[int], histogram: list[int]) -> dict:
    return {
        "output_ids": ids,
        "meta_info": {
            "spec_num_correct_drafts": 0,
            "spec_verify_ct": sum(histogram),
            "spec_correct_drafts_histogram": histogram,
        },
    }


def test_tau_is_pooled_over_a_kind_and_averaged_over_kinds(ablations):
    answers = {
        "math": [answer([1, 2], [1, 1]), answer([3], [0, 2])],  # 3 of 4 rounds, one draft each
        "code": [answer([4], [2])],
    }
    found = ablations.measure(answers, {"math": [[1, 2], [9]], "code": [[4]]})
    assert found["held_out"]["math"]["tau"] == 1.75
    assert found["tau"] == (1.75 + 1.0) / 2
    assert (found["identical"], found["answers"]) == (2, 3)


def run(seed: int, tau: float) -> dict:
    kinds = {kind: {"tau": tau} for kind in ("math", "code", "chat")}
    served = {"tau": tau, "held_out": kinds, "identical": 3, "answers": 3}
    return {"seed": seed, "served": served, "trained": {"step": 600}}


def test_the_report_says_what_the_seeds_say(ablations, tmp_path):
    results = {name: [] for name in ablations.VARIANTS}
    results["baseline"] = [run(0, 3.0), run(1, 3.2)]
    results["fc"] = [run(0, 2.5), run(1, 2.9)]
    results["mean teacher"] = [run(0, 3.1), run(1, 3.1)]
    ablations.write_report(results, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "| generic fc | **2.70** (2.50, 2.90) |" in text
    assert "-0.40 (-0.50 to -0.30), lower with every seed" in text
    assert "+0.00 (-0.10 to +0.10), seeds disagree" in text
    assert "| gate at random | not run |" in text
    assert "18 of 18 answers" in text
    assert (tmp_path / "tau.svg").read_text().lstrip().startswith("<?xml")
    assert json.loads((tmp_path / "results.json").read_text())["results"]["fc"]


def test_nothing_served_is_said(ablations, tmp_path):
    with pytest.raises(SystemExit, match="run train and serve first"):
        ablations.write_report({name: [] for name in ablations.VARIANTS}, tmp_path / "out")
    assert not (tmp_path / "out").exists()

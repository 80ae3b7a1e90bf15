"""paired_speed.py: ratios of speeds measured prompt by prompt."""

from __future__ import annotations

import argparse

import pytest

from tests.conftest import EXAMPLE


@pytest.fixture
def speed(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import paired_speed

    return paired_speed


def answers(of_plain: float, of_head: float) -> dict:
    """Two kinds of two prompts; the second kind's answers are ten times as long."""

    def row(tokens: int) -> dict:
        seconds = {"no speculation": 1.0, "the same again": 1.0}
        seconds |= {"hyperdflash": 1 / of_plain, "hyperdflash2": 1 / of_head}
        return {n: [tokens, tokens * one, (tokens - 1) * one * 2] for n, one in seconds.items()}

    return {"0": {"short": [row(4), row(6)], "long": [row(40), row(60)]}}


def test_a_ratio_is_the_mean_of_the_seeds_and_its_interval_is_over_prompts(speed):
    seeds = [answers(2.0, 3.0), answers(2.0, 4.0)]
    found = speed.ratios(seeds, "0", "hyperdflash2", "hyperdflash")
    for of in found.values():
        assert of["seeds"] == pytest.approx([1.5, 2.0])
        assert [of["mean"], *of["interval"]] == pytest.approx([1.75] * 3), "all prompts are alike"
    # One long answer takes twice as long: over all answers that weighs, in its kind by half.
    seeds[0]["0"]["long"][1]["hyperdflash2"][1] *= 2
    found = speed.ratios(seeds, "0", "hyperdflash2", "hyperdflash")
    assert found["all"]["seeds"][0] == pytest.approx(1.5 * 110 / 170)
    assert found["kinds"]["seeds"][0] == pytest.approx((1.5 + 1.5 * 100 / 160) / 2)
    low, high = found["all"]["interval"]
    assert high - low > 0.1, "one prompt decides"
    again = speed.ratios(seeds, "0", "the same again", "no speculation")
    assert again["all"]["mean"] == 1.0


def test_the_report_has_every_ratio(speed):
    variants = ["hyperdflash", "hyperdflash2"]
    args = argparse.Namespace(temperatures=["0"], max_new_tokens=64, variants=variants)
    text = "\n".join(speed.report({"0": answers(2.0, 3.0)}, args))
    cell = "1.500x (1.500 to 1.500; 1.50)"
    assert f"| 0 | hyperdflash2 over hyperdflash | {cell} | {cell} | {cell} |" in text
    assert "1 seeds of each drafter, 4 prompts of 2 kinds" in text
    assert "hyperdflash2 at 0: 27.5" in text

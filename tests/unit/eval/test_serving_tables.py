"""The tables of a serving study."""

from __future__ import annotations

from eval.tables import number, serving_tables


def test_the_study_s_tables():
    load = {"requests": 8, "ttft_ms": [1, 2], "tpot_ms": [3, 4], "e2e_ms": [5, 6]}
    content = {
        "round_ms": {
            "target": {"target": 3.0, "draft": 0.5, "scheduler": 0.5, "rounds": 99},
            "hyperdflash6": {"target": 4.0, "draft": 1.5, "scheduler": 0.5, "rounds": 99},
            "mtp3": None,
        },
        "concurrency": {
            "target": [
                {"concurrency": 1, "tokens_per_s": 100.0, **load},
                {"concurrency": 4, "tokens_per_s": 300.0, **load},
            ],
            "hyperdflash6": [{"concurrency": 1, "tokens_per_s": 180.0, **load}],
        },
        "poisson": {"target": [{"rate": 2.0, "tokens_per_s": 90.0, **load}], "hyperdflash6": []},
    }
    tables = serving_tables(content)
    cells = {(t.title, line.cells) for t in tables for line in t.lines}
    rounds, load_title, poisson = (t.title for t in tables)
    assert (rounds, ("HyperDFlash (6)", "4.00", "1.50", "0.50", "2.00")) in cells
    assert (load_title, ("HyperDFlash (6)", "180", number(None))) in cells
    assert "2 a second" in poisson
    assert (poisson, ("target only", "1 / 2", "3 / 4", "5 / 6")) in cells

"""The tables of a serving study."""

from __future__ import annotations

from eval.tables import number, serving_tables


def test_the_study_s_tables(serving_study):
    tables = serving_tables(serving_study)
    cells = {(t.title, line.cells) for t in tables for line in t.lines}
    rounds, load_title, poisson = (t.title for t in tables)
    assert (rounds, ("HyperDFlash (6)", "4.00", "1.50", "0.50", "2.00")) in cells
    assert (load_title, ("HyperDFlash (6)", "180", number(None))) in cells
    assert "2 a second" in poisson
    assert (poisson, ("target only", "1 / 2", "3 / 4", "5 / 6")) in cells

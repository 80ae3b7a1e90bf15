"""What a run says: against each rival, identity, the noise floor."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eval.comparison import Row, noise_range, settings_of
from eval.identity import TIE_GAPS
from eval.methods import BASELINE, label
from eval.tables import Line, Table, rows_of_setting, setting_words, spread


def tau_verdict(interval: Sequence[float] | None) -> str:
    """Whether the interval of a difference leaves zero out."""
    if interval is None:
        return "interval not stored"
    if interval[0] > 0:
        return "higher"
    return "lower" if interval[1] < 0 else "no difference shown"


def speedup_verdict(entry: Row) -> str:
    """Whether the ratio leaves one out, and is more than target-only against itself gives."""
    ours, theirs = entry["speedup"]
    noise, interval = entry.get("noise"), entry.get("speedup_ratio_interval")
    if noise is not None:
        floor = max(noise[1], 1 / noise[0])
        if 1 / floor <= ours / theirs <= floor:
            return "within the noise floor"
    if interval is not None and interval[0] <= 1 <= interval[1]:
        return "no difference shown"
    if interval is None:
        return f"{'outside the noise floor, ' if noise is not None else ''}interval not stored"
    verdict = "higher" if ours > theirs else "lower"
    return verdict if noise is not None else f"{verdict}, noise floor not measured"


def _rival_lines(entry: Row) -> list[Line]:
    """One line a measure: tau over all rounds, and the means of benchmarks."""
    rival = label(entry["rival"])
    lines = []
    for name, words in (("tau", "τ over all rounds"), ("mean_tau", "τ, mean of benchmarks")):
        if entry.get(name):
            a, b = entry[name]
            bounds = entry.get(f"{name}_difference_interval")
            shown = f"{a - b:+.2f}" + (f" ({bounds[0]:+.2f} to {bounds[1]:+.2f})" if bounds else "")
            lines.append((words, f"{a:.2f}", f"{b:.2f}", shown, tau_verdict(bounds)))
    if entry.get("speedup"):
        a, b = entry["speedup"]
        shown = "x " + spread(a / b, entry.get("speedup_ratio_interval"))
        words = "speedup, mean of benchmarks"
        lines.append((words, f"{a:.2f}", f"{b:.2f}", shown, speedup_verdict(entry)))
    return [Line((rival, *cells)) for cells in lines]


def rival_tables(comparisons: Sequence[Row]) -> list[Table]:
    """Each of our methods against its rivals, a table for each setting."""
    tables = []
    for setting in settings_of(comparisons):
        part = rows_of_setting(comparisons, setting)
        for ours in dict.fromkeys(entry["ours"] for entry in part):
            heads = ("against", "measure", label(ours), "rival", "difference (95 %)", "verdict")
            own = (entry for entry in part if entry["ours"] == ours)
            lines = tuple(line for entry in own for line in _rival_lines(entry))
            tables.append(Table(f"{label(ours)}: {setting_words(setting)}", heads, lines))
    return tables


def identity_lines(rows: Sequence[Row]) -> list[str]:
    """How many greedy answers equal target-only's: our methods, rivals, target-only again."""
    sentences = []
    for method in dict.fromkeys(r["method"] for r in rows):
        own = [r for r in rows if r["method"] == method and r.get("compared_answers")]
        if not own or method == BASELINE:
            continue
        same, total = (sum(r[k] for r in own) for k in ("identical_answers", "compared_answers"))
        text = f"{label(method)}: {same} of {total} greedy answers are target-only's, token for"
        text += " token"
        if same < total:
            found = [d["verdict"] for r in own for d in r.get("differences") or ()]
            words = [
                f"{found.count(w)} {w}{'s' if found.count(w) != 1 else ''}"
                for w in ("tie", "fault")
            ]
            unknown = total - same - found.count("tie") - found.count("fault")
            words += [f"{unknown} with a gap that was not measured"] if unknown else []
            text += f"; of the others {', '.join(words)}"
        sentences.append(text + ".")
    return sentences


def identity_meaning(rows: Sequence[Row]) -> str:
    """What a tie and a fault are, for the data types that were seen."""
    found = {d.get("dtype") for r in rows for d in r.get("differences") or ()} - {None}
    bounds = ", ".join(f"{TIE_GAPS[name]:g} in {name}" for name in sorted(found) or TIE_GAPS)
    return (
        "Where an answer first differs, the target is asked how far apart, in logits, it holds the "
        f"two candidates. A gap of at most {bounds} is a tie: a method verifies several positions "
        "in one pass, a pass of another shape rounds otherwise, and either token is the target's "
        "own greedy choice up to rounding. bfloat16 keeps 8 bits, so ties are expected there; "
        "target-only against itself shows them too when requests share a batch. A larger gap is a "
        "fault of the method or of the server: report it."
    )


def noise_lines(rows: Sequence[Row]) -> list[str]:
    """What target-only against itself gives: differences of speedup below it mean nothing."""
    sentences = []
    for setting in settings_of(rows):
        found = noise_range(rows, setting)
        if found is not None:
            words = setting_words(setting)
            low, high = found
            sentences.append(f"{words}: speedups from {low:.2f} to {high:.2f}.")
    return sentences


def mean_of(rows: Sequence[Row], method: str, column: str, **where: Any) -> float | None:
    """The mean of a column over a method's whole rows; None when there are none."""
    values = [
        r[column]
        for r in rows
        if r["method"] == method
        and not r.get("error")
        and r.get(column) is not None
        and all(r[k] == v for k, v in where.items())
    ]
    return sum(values) / len(values) if values else None

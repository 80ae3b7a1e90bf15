"""The reports of ``study.py``: ratios of methods, with intervals over prompts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import bootstrap

BASELINE, NOISE = "baseline", "baseline again"
RESAMPLES = 1000
# Of each set of prompts, numerators and denominators of a rate: ``[seeds, prompts, 2]``.
Tables = Sequence[np.ndarray]


def rates(tables: Tables, rows: Sequence[Any]) -> np.ndarray:
    """Each seed's rate, ``[seeds, ...]``.

    Args:
        rows: of each set, the prompts that count, ``[..., number]``.
    """
    total = sum(table[:, chosen].sum(-2) for table, chosen in zip(tables, rows, strict=True))
    return total[..., 0] / total[..., 1]


def rate(tables: Tables) -> str:
    """The mean over seeds, of all prompts."""
    return f"{rates(tables, [slice(None)] * len(tables)).mean():.2f}"


def ratio(ours: Tables, theirs: Tables) -> str:
    """Mean over seeds of the ratio of two rates, its 95 % interval over prompts, and each seed's.

    Prompts are drawn with replacement within each set, the same ones for every seed and method.
    """

    def ratios(*rows: np.ndarray, axis: int = -1) -> np.ndarray:
        return (rates(ours, rows) / rates(theirs, rows)).mean(0)

    every = [np.arange(table.shape[1]) for table in ours]
    found = bootstrap(
        every,
        ratios,
        n_resamples=RESAMPLES,
        method="percentile",
        vectorized=True,
        rng=np.random.default_rng(0),
    )
    low, high = found.confidence_interval
    seeds = rates(ours, every) / rates(theirs, every)
    each = f"; {', '.join(f'{one:.2f}' for one in seeds)}" if len(seeds) > 1 else ""
    return f"{seeds.mean():.2f}x ({low:.2f} to {high:.2f}{each})"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A Markdown table and an empty line."""
    lines = [f"| {' | '.join(line)} |" for line in (header, *rows)]
    return [lines[0], "|---" * len(header) + "|", *lines[1:], ""]


def render(found: dict[str, Any]) -> str:
    """The report of a result of ``study.py serve`` or ``study.py speed``."""
    seeds = list(found["seeds"].values())
    lines = speeds(seeds) if BASELINE in seeds[0] else accepted(seeds, found["nats"])
    return "\n".join(lines)


def accepted(seeds: list[dict[str, Any]], nats: dict[str, dict[str, float]]) -> list[str]:
    """Accept lengths: a round gives its accepted drafts and one more token.

    Args:
        seeds: variant -> its counts, ``{temperature: {set: [[rounds, accepted drafts], ...]}}``,
            and ``identical``, ``answers``, ``repeats`` and ``steps``.
        nats: temperature -> set -> nats per token of the baseline.
    """
    names = [name for name in seeds[0] if all(name in runs for runs in seeds)]
    every = [runs[name] for runs in seeds for name in names]
    sets = list(nats["0"])

    def of(name: str, t: str, *some: str) -> Tables:
        counts = [np.array([runs[name]["counts"][t][one] for runs in seeds]) for one in some]
        return [np.stack([c.sum(-1), c[..., 0]], -1) for c in counts]

    def listed(key: str) -> str:
        return " or ".join(map(str, sorted({run[key] for run in every})))

    same, answers = (sum(run[key] for run in every) for key in ("identical", "answers"))
    prompts = sum(map(len, every[0]["counts"]["0"].values()))
    lines = [
        "# Accept length of drafters that differ in one choice",
        "",
        f"{len(seeds)} trainings of each drafter, {listed('steps')} steps; {prompts} prompts of "
        f"{len(sets)} sets; sampled prompts were asked {listed('repeats')} times. {same} of "
        f"{answers} greedy answers equal the baseline's token for token. The accept length is 1 + "
        "accepted drafts / verification rounds, over all rounds, the mean over trainings. In "
        "brackets: the 95 % bootstrap interval over prompts, and each training's own ratio.",
        "",
    ]
    for other in ("hyperdflash", "hyperdflash, argmax drafts", "hyperdflash2"):
        if other in names:
            rows = [
                [name, *(rate(of(name, t, *sets)) for t in nats)]
                + [ratio(of(name, t, *sets), of(other, t, *sets)) for t in nats]
                for name in names
            ]
            header = ["variant", *(f"T {t}" for t in nats), *(f"ratio, T {t}" for t in nats)]
            lines += [f"## Over {other}", "", *table(header, rows)]
    columns = [(t, one) for one in sets for t in nats]
    rows = [[name, *(rate(of(name, t, one)) for t, one in columns)] for name in names]
    rows.append(["baseline, nats per token", *(f"{nats[t][one]:.2f}" for t, one in columns)])
    header = ["variant", *(f"{one}, T {t}" for t, one in columns)]
    return [*lines, "## By set", "", *table(header, rows)]


def speeds(seeds: list[dict[str, Any]]) -> list[str]:
    """Speeds at one request at a time.

    Args:
        seeds: server -> temperature -> set -> ``[tokens, seconds, seconds after the first token]``
            of each prompt.
    """
    first = seeds[0][BASELINE]
    variants = [name for name in seeds[0] if name not in (BASELINE, NOISE)]
    pairs = [(name, BASELINE) for name in variants]
    pairs += [*((name, variants[0]) for name in variants[1:]), (NOISE, BASELINE)]

    def of(name: str, t: str, decoding: bool) -> Tables:
        rows = [np.array([runs[name][t][one] for runs in seeds]) for one in first[t]]
        return [np.stack([r[..., 0] - decoding, r[..., 1 + decoding]], -1) for r in rows]

    rows = [
        [t, f"{ours} over {theirs}"]
        + [ratio(of(ours, t, decoding), of(theirs, t, decoding)) for decoding in (False, True)]
        for t in first
        for ours, theirs in pairs
    ]
    t, *_ = first
    prompts = [one for of_set in first[t].values() for one in of_set]
    tokens = sum(one[0] for one in prompts) / len(prompts)
    return [
        "# Speed at one request at a time",
        "",
        f"{len(seeds)} trainings of each drafter; {len(prompts)} prompts of {len(first[t])} sets, "
        "each asked of all servers one after another; no prefix cache. Output tokens per second of "
        "streamed requests, prefill included, and after the first token. Means over trainings; "
        "in brackets the 95 % bootstrap interval over prompts and each training's own. A second "
        "server of the baseline shows the noise. The baseline's answers have "
        f"{tokens:.1f} tokens on average at temperature {t}.",
        "",
        *table(["temperature", "", "whole requests", "after the first token"], rows),
    ]

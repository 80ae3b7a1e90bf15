"""The reports of ``study.py``: ratios of methods, with intervals over prompts."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy.stats import bootstrap

BASELINE, NOISE = "baseline", "baseline again"
RESAMPLES = 1000
# Of each set of prompts, numerators and denominators of a rate: ``[seeds, prompts, 2]``.
Fractions = Sequence[np.ndarray]


def rates(fractions: Fractions, prompts: Sequence[Any]) -> np.ndarray:
    """Return each seed's rate, ``[seeds, ...]``; ``prompts`` are each set's, ``[..., number]``."""
    total = sum(table[:, i].sum(-2) for table, i in zip(fractions, prompts, strict=True))
    return total[..., 0] / total[..., 1]


def rate(fractions: Fractions) -> str:
    """Return the mean rate over seeds, of all prompts."""
    return f"{rates(fractions, [slice(None)] * len(fractions)).mean():.2f}"


def ratios(method: Fractions, reference: Fractions) -> tuple[np.ndarray, float, float]:
    """Return each seed's ratio of two rates, and the bounds of the 95 % interval of their mean.

    The interval is over prompts, drawn with replacement within each set, the same ones for every
    seed and method.
    """

    def mean_ratio(*prompts: np.ndarray, axis: int = -1) -> np.ndarray:
        return (rates(method, prompts) / rates(reference, prompts)).mean(0)

    prompts = [np.arange(table.shape[1]) for table in method]
    options = {"method": "percentile", "vectorized": True, "rng": np.random.default_rng(0)}
    low, high = bootstrap(prompts, mean_ratio, n_resamples=RESAMPLES, **options).confidence_interval
    return rates(method, prompts) / rates(reference, prompts), low, high


def ratio(method: Fractions, reference: Fractions) -> str:
    """Return the mean of ``ratios`` with its interval, and each seed's where there are several."""
    seeds, low, high = ratios(method, reference)
    by_seed = f"; {', '.join(f'{value:.2f}' for value in seeds)}" if len(seeds) > 1 else ""
    return f"{seeds.mean():.2f}x ({low:.2f} to {high:.2f}{by_seed})"


def tokens_per_round(
    seeds: Sequence[dict[str, Any]], name: str, temperature: str, *sets: str
) -> Fractions:
    """Return tokens and verification rounds of a variant of ``study.py serve``."""
    counts = [np.array([v[name]["counts"][temperature][k] for v in seeds]) for k in sets]
    return [np.stack([c.sum(-1), c[..., 0]], -1) for c in counts]


def tokens_per_second(
    seeds: Sequence[dict[str, Any]], name: str, temperature: str, skipped: int = 0
) -> Fractions:
    """Return tokens and seconds of a server of ``study.py speed``.

    They are of whole requests (``skipped`` 0), or of what follows the first token (1).
    """
    sets = seeds[0][BASELINE][temperature]
    times = [np.array([servers[name][temperature][k] for servers in seeds]) for k in sets]
    return [np.stack([x[..., 0] - skipped, x[..., 1 + skipped]], -1) for x in times]


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return a Markdown table and an empty line."""
    lines = [f"| {' | '.join(cells)} |" for cells in (header, *rows)]
    return [lines[0], "|---" * len(header) + "|", *lines[1:], ""]


def render(result: dict[str, Any]) -> str:
    """Return the report of a result of ``study.py serve`` or ``study.py speed``."""
    seeds = list(result["seeds"].values())
    lines = speeds(seeds) if BASELINE in seeds[0] else accepted(seeds, result["nats"])
    return "\n".join(lines)


def accepted(seeds: list[dict[str, Any]], nats: dict[str, dict[str, float]]) -> list[str]:
    """Report accept lengths: a round gives its accepted drafts and one more token.

    Args:
        seeds: variant -> its counts, ``{temperature: {set: [[rounds, accepted drafts], ...]}}``,
            and ``identical``, ``answers``, ``repeats`` and ``steps``.
        nats: temperature -> set -> nats per token of the baseline.
    """
    names = [name for name in seeds[0] if all(name in variants for variants in seeds)]
    runs = [variants[name] for variants in seeds for name in names]
    sets = list(nats["0"])

    def values(key: str) -> str:
        return " or ".join(map(str, sorted({run[key] for run in runs})))

    identical, answers = (sum(run[key] for run in runs) for key in ("identical", "answers"))
    prompts = sum(map(len, runs[0]["counts"]["0"].values()))
    lines = [
        "# Accept length of drafters that differ in one choice",
        "",
        f"{len(seeds)} trainings of each drafter, {values('steps')} steps; {prompts} prompts of "
        f"{len(sets)} sets; sampled prompts were asked {values('repeats')} times. {identical} of "
        f"{answers} greedy answers equal the baseline's token for token. The accept length is 1 + "
        "accepted drafts / verification rounds, over all rounds, the mean over trainings. In "
        "brackets: the 95 % bootstrap interval over prompts, and each training's own ratio.",
        "",
    ]
    totals = {name: {t: tokens_per_round(seeds, name, t, *sets) for t in nats} for name in names}
    for reference in ("dflash", "dflash, dependency head", "hyperdflash", "hyperdflash2"):
        if reference in names:
            rows = [
                [name, *map(rate, total.values())]
                + [ratio(total[t], totals[reference][t]) for t in nats]
                for name, total in totals.items()
            ]
            header = ["variant", *(f"T {t}" for t in nats), *(f"ratio, T {t}" for t in nats)]
            lines += [f"## Over {reference}", "", *table(header, rows)]
    columns = [(t, k) for k in sets for t in nats]
    rows = [
        [name, *(rate(tokens_per_round(seeds, name, t, k)) for t, k in columns)] for name in names
    ]
    rows.append(["baseline, nats per token", *(f"{nats[t][k]:.2f}" for t, k in columns)])
    return [
        *lines,
        "## By set",
        "",
        *table(["variant", *(f"{k}, T {t}" for t, k in columns)], rows),
    ]


def speeds(seeds: list[dict[str, Any]]) -> list[str]:
    """Report speeds at one request at a time.

    Args:
        seeds: server -> temperature -> set -> ``[tokens, seconds, seconds after the first token]``
            of each prompt.
    """
    baseline = seeds[0][BASELINE]
    variants = [name for name in seeds[0] if name not in (BASELINE, NOISE)]
    pairs = [(name, BASELINE) for name in variants]
    pairs += [*((name, variants[0]) for name in variants[1:]), (NOISE, BASELINE)]

    rows = [
        [t, " over ".join(pair)]
        + [ratio(*(tokens_per_second(seeds, name, t, i) for name in pair)) for i in (0, 1)]
        for t in baseline
        for pair in pairs
    ]
    t, sets = next(iter(baseline.items()))
    tokens = [prompt[0] for prompts in sets.values() for prompt in prompts]
    return [
        "# Speed at one request at a time",
        "",
        f"{len(seeds)} trainings of each drafter; {len(tokens)} prompts of {len(sets)} sets, "
        "each asked of all servers one after another; no prefix cache. Output tokens per second of "
        "streamed requests, prefill included, and after the first token. Means over trainings; "
        "in brackets the 95 % bootstrap interval over prompts and each training's own. A second "
        "server of the baseline shows the noise. The baseline's answers have "
        f"{sum(tokens) / len(tokens):.1f} tokens on average at temperature {t}.",
        "",
        *table(["temperature", "", "whole requests", "after the first token"], rows),
    ]

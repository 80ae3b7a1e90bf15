"""``hyperdflash plan --logprobs``: what a drafter can accept at most of one's own traffic.

From returned log-probabilities of sampled answers. SGLang's are those after the division by the
temperature, so the bounds are of the answers' own temperature. Whatever an argmax draft is, it is
rejected at least as often as the target does not draw its likeliest token. Every rejection ends a
round, and so does every token that a full block leaves to the target. So a text of n tokens takes
at least ``n (1 - mean largest probability)`` rounds, with blocks of any width. Products of the mean
are no bound: rounds may start where tokens are sure.

What the target's own argmax would accept is counted, by laying rounds over the answers. Nothing
bounds sampled drafts: those drawn from the target's own distribution are all accepted.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sglang_hyperdflash.serving.scheduler.metrics import REQUESTS, SAMPLED, SECONDS, WIDTH
from sglang_hyperdflash.serving.settings import NARROW
from sglang_hyperdflash.serving.width.policy import CostTable, best_width
from sglang_hyperdflash.tools.errors import HyperDFlashConfigError
from sglang_hyperdflash.tools.jsonl import read_lines

EXPECTED = (
    "an answer of SGLang's /generate with return_logprob and top_logprobs_num of at least 1, or an "
    "OpenAI chat completion with logprobs and top_logprobs of at least 1, whole and on one line"
)
# A server's, of a drafter with blocks of the default size.
WIDTHS = (*NARROW, 7)
RESAMPLES = 1000
# Log-probabilities are rounded; a positive one beyond this is something else.
SLACK = 0.01
# Standard errors, and share of the tokens, by which drawn tokens must differ from their
# probabilities to be reported.
SURPRISE, LEAST = 4.0, 0.01
# A token's name and log-probability; a value and its interval.
Scored = tuple[Any, float]
Interval = tuple[float, float, float]


@dataclass(frozen=True)
class Answer:
    """The tokens of an answer that a round may draft, all but the first; arrays ``[tokens]``.

    Attributes:
        most: the largest probability. top: whether its token was drawn.
    """

    most: np.ndarray
    top: np.ndarray


def _token(chosen: Scored, listed: Sequence[Scored]) -> tuple[float, bool]:
    """An :class:`Answer`'s row.

    Raises:
        ValueError, TypeError: not log-probabilities, or none is listed.
    """
    for name, logprob in (chosen, *listed):
        if not logprob <= SLACK:
            raise ValueError(f"a log-probability of {logprob} for token {name!r}")
    likeliest, logprob = max(listed, key=lambda one: one[1])
    return min(1.0, math.exp(logprob)), likeliest == chosen[0]


def _rows(reply: dict[str, Any]) -> Iterator[Iterator[tuple[Scored, list[Scored]]]]:
    """Of each answer of a reply: its tokens and the listed ones.

    Seams: ``TokenizerManager.add_logprob_to_meta_info`` (triples of log-probability, id and text).
    """
    if "meta_info" in reply:
        meta = reply["meta_info"]
        if meta.get("finish_reason", "") is None:
            raise ValueError("a part of a stream")
        pairs = zip(meta["output_token_logprobs"], meta["output_top_logprobs"], strict=True)
        yield ((one[1::-1], [each[1::-1] for each in listed]) for one, listed in pairs)
        return
    for choice in reply["choices"]:
        # Pieces of a character may have the same text.
        yield (
            ((_named(one), one["logprob"]), [(_named(each), each["logprob"]) for each in listed])
            for one in choice["logprobs"]["content"]
            for listed in [one["top_logprobs"]]
        )


def _named(token: dict[str, Any]) -> tuple[Any, ...]:
    """What tells an OpenAI token from others."""
    return token["token"], *(token.get("bytes") or ())


def read_answers(path: Path) -> Iterator[list[Answer]]:
    """The answers of each line; SGLang's and OpenAI's lines may be mixed.

    Raises:
        HyperDFlashConfigError: a line is neither. BadRow: it is not a JSON object.
    """
    for where, reply in read_lines(path):
        try:
            answers = [[_token(*row) for row in rows][1:] for rows in _rows(reply)]
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise HyperDFlashConfigError(
                f"{where}: expected {EXPECTED}; found one with "
                f"{', '.join(list(reply)[:8]) or 'no fields'} ({type(error).__name__}: {error})."
            ) from error
        yield [Answer(*np.array(rows, float).reshape(-1, 2).T) for rows in answers]


def own_rounds(answer: Answer, width: int) -> int:
    """Rounds of an answer where each draft is the target's own likeliest token."""
    misses = np.append(np.flatnonzero(answer.top == 0), len(answer.top))
    rounds = at = 0
    while at < len(answer.top):
        run = int(min(misses[np.searchsorted(misses, at)] - at, width - 1))
        rounds, at = rounds + 1, at + run + 1
    return rounds


def request_sums(answers: Sequence[Answer], widths: Sequence[int]) -> np.ndarray:
    """All that is summed over requests, ``[2, 3 + widths]``: numerators over denominators.

    Columns: largest probability; whether its token was drawn, and that draw's variance; tokens a
    round if each draft is the target's own argmax, by width.
    """
    total = np.zeros((2, 3 + len(widths)))
    for answer in answers:
        tokens = len(answer.top)
        sums = answer.most, answer.top, answer.most * (1 - answer.most)
        each = [(one.sum(), tokens) for one in sums]
        each += [(tokens, own_rounds(answer, w)) for w in widths]
        total += np.array(each).T
    return total


@dataclass(frozen=True)
class Bounds:
    """Each number is ``(value, low, high)``: the 95 % interval by bootstrap over requests.

    Attributes:
        tokens: that a round may draft.
        likeliest: mean probability of the likeliest token. drawn: share of the tokens that are
            the likeliest. drawn_from_these: whether the two agree.
        own: tokens a round by width, if each draft is the target's own argmax.
        argmax: if each is any drafter's, at most.
        pays: for each timed batch size and kind of drafts, the best width, and its speed over
            width 1.
    """

    requests: int
    tokens: int
    likeliest: Interval
    drawn: Interval
    drawn_from_these: bool
    own: dict[int, Interval]
    argmax: dict[int, Interval]
    pays: dict[int, dict[str, tuple[int, float]]]


def _values(sums: np.ndarray, widths: Sequence[int]) -> np.ndarray:
    """The columns of :func:`request_sums` as ratios; and bounds.

    A bound of tokens a round for each width: a rejection ends a round, or its last row does.
    """
    found = sums[0] / sums[1]
    rejected = 1 - found[0]
    return np.append(found, [1 / max(rejected, 1 / w) for w in widths])


def bounds(path: Path, widths: Sequence[int], costs: CostTable | None = None) -> Bounds:
    """Bounds of all answers of a file.

    Raises:
        HyperDFlashConfigError: see :func:`read_answers`; or there are too few.
    """
    sums = np.array([request_sums(line, widths) for line in read_answers(path)])
    sums = sums[sums[:, 1, 0] > 0] if len(sums) else sums
    if len(sums) < 2:
        raise HyperDFlashConfigError(
            f"{path}: expected at least two requests with answers of two tokens or more, found "
            f"{len(sums)}."
        )
    rng, many = np.random.default_rng(0), len(sums)
    weights = (rng.multinomial(many, np.full(many, 1 / many)) for _ in range(RESAMPLES))
    resampled = [_values(np.tensordot(w, sums, 1), widths) for w in weights]
    ends = np.quantile(resampled, (0.025, 0.975), axis=0)
    rows = np.array([_values(sums.sum(0), widths), *ends]).T
    likeliest, drawn, variance, *found = (tuple(row) for row in rows.tolist())
    tokens = int(sums[:, 1, 0].sum())
    error = max(LEAST, SURPRISE * math.sqrt(variance[0] / tokens))
    own, argmax = (dict(zip(widths, part, strict=False)) for part in (found, found[len(widths) :]))
    kinds = {"own": own, "argmax": argmax, "sampled": {w: (w,) for w in widths}}
    return Bounds(
        requests=many,
        tokens=tokens,
        likeliest=likeliest,
        drawn=drawn,
        drawn_from_these=abs(drawn[0] - likeliest[0]) < error,
        own=own,
        argmax=argmax,
        pays={n: _pays(costs.of(n, True), kinds) for n in costs.sizes} if costs else {},
    )


def _pays(seconds: dict[int, float], kinds: dict[str, Any]) -> dict[str, tuple[int, float]]:
    """The width that the server's policy would choose with so many tokens a round."""
    found = {}
    for kind, tokens in kinds.items():
        rates = {w: tokens[w][0] / taken for w, taken in seconds.items()}
        best = best_width(rates, 1)
        found[kind] = best, rates[best] / rates[1]
    return found


def read_costs(path: Path) -> CostTable:
    """Rounds of sampled requests, from the text that a server's ``/metrics`` returned.

    Raises:
        HyperDFlashConfigError: the file is not such a text, or a batch size lacks a width.
    """
    from prometheus_client.parser import text_string_to_metric_families

    cells: dict[int, dict[int, float]] = {}
    try:
        for family in text_string_to_metric_families(path.read_text(encoding="utf-8")):
            for sample in family.samples if family.name == SECONDS else ():
                if sample.labels[SAMPLED] == "true":
                    row = cells.setdefault(int(sample.labels[REQUESTS]), {})
                    row[int(sample.labels[WIDTH])] = sample.value
    except (OSError, ValueError, KeyError) as error:
        raise HyperDFlashConfigError(
            f"{path}: expected what a server's /metrics returned ({type(error).__name__}: {error})."
        ) from error
    widths = sorted(set().union(*cells.values()))
    whole = all(len(row) == len(widths) and min(row.values()) > 0 for row in cells.values())
    if not (whole and 1 in widths and len(widths) > 1):
        raise HyperDFlashConfigError(
            f"{path}: expected {SECONDS} of sampled rounds, above 0, for width 1 and wider ones at "
            f"each batch size; found widths {', '.join(map(str, widths)) or 'none'} of "
            f"{len(cells)} batch sizes. A server with --enable-metrics and an adaptive width "
            "exports them."
        )
    costs = CostTable(widths)
    for requests, row in sorted(cells.items()):
        costs.add(requests, [row[w] for w in widths] * 2)  # greedy rounds are not asked for
    return costs


def _shown(interval: Interval) -> str:
    return "{:.2f} ({:.2f} to {:.2f})".format(*interval)


def report(found: Bounds) -> str:
    """The bounds as text."""
    heads = ("target's own argmax", "argmax drafts, at most", "sampled, at most")
    lines = [
        f"{found.requests:,} requests, {found.tokens:,} tokens",
        f"likeliest token: probability {_shown(found.likeliest)}, drawn {_shown(found.drawn)}",
        "tokens a round at the answers' temperature, with 95 % intervals:",
        "width  {:<24}{:<24}{}".format(*heads),
    ]
    for w, own in found.own.items():
        lines.append(f"{w:>5}  {_shown(own):<24}{_shown(found.argmax[w]):<24}{w}")
    if found.pays:
        lines.append("best width, and its speed over width 1:")
        lines.append("requests  {:<24}{:<24}{}".format(*heads))
    for requests, kinds in found.pays.items():
        own, most, sampled = (f"{w} ({speed:.2f})" for w, speed in kinds.values())
        lines.append(f"{requests:>8}  {own:<24}{most:<24}{sampled}")
    if not found.drawn_from_these:
        lines.append(
            "These tokens were not drawn from these probabilities, so nothing above is a bound: "
            "sample above temperature 0, without top-p, top-k or min-p."
        )
    return "\n".join(lines)


def run(args: argparse.Namespace) -> int:
    """Print the bounds, or their JSON."""
    costs = read_costs(args.round_costs) if args.round_costs else None
    found = bounds(args.logprobs, costs.widths if costs else WIDTHS, costs)
    print(json.dumps(asdict(found), indent=1) if args.json else report(found))
    return 0


def add_arguments(parser) -> None:
    """Register the options of ``plan --logprobs``."""
    add = parser.add_argument_group("bounds of acceptance").add_argument
    add(
        "--logprobs",
        type=Path,
        metavar="FILE",
        help="answers with top log-probabilities, one SGLang or OpenAI reply a line, no list of "
        "replies (default: K/V memory)",
    )
    add(
        "--round-costs",
        type=Path,
        metavar="FILE",
        help="what the /metrics of a server with an adaptive width returned; with --logprobs the "
        "best width is printed (default: none)",
    )

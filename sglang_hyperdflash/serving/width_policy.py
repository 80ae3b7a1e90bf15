"""Which width the next round should have: expected tokens over measured seconds. Host only.

    tokens(w) = sum over requests of 1 + sum_{k < w} a_1 ... a_k      # a_k: acceptance of draft k
    choose the w with the largest kept(tokens(w)) / (seconds(batch size, w) + prefill_share(w))

Every round of width w shows whether draft k <= w - 1 is accepted where the k - 1 before it were, so
what narrow rounds do not show is left out and not counted as refused. Seconds are medians of this
server's own rounds; what was not measured comes from a fit over what was, else it is measured.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

# Request-rounds after which an observation counts half; trials that the draft before it stands for.
HALF_LIFE, PRIOR_TRIALS, FIRST_PRIOR = 512, 4.0, 0.8
SAMPLES = 15
HYSTERESIS = 0.03
# Rounds in a row. But for ``timed_alone`` the first follows a round of another width and is not
# timed, nor is the second of a probe: the draft K/V that waited at width 1 were written in between.
EXPLORE, PROBE = 4, 3
ALONE = 2
ATTEMPTS, RETRY = 3, 32
# Probing may cost so much of the time, and no width is probed more often than this.
PROBE_SHARE, PROBE_EVERY = 0.01, 32
# Probes that change nothing at width 1 come half as often each time, down to one in so many.
MOST_PATIENCE = 8
# Ended answers after which one counts half.
ENDS_HALF_LIFE = 128
# Prefill passes that tell what one costs without its tokens, and how many it takes.
PREFILLS, FEWEST_PREFILLS = 32, 8

Cell = tuple[int, int]
Cells = Mapping[Cell, float]
# Measured cells, what fits them, and a prefill pass: all that a decision knows of time.
Table = tuple[dict[Cell, float], tuple[float, ...] | None, float]


def bucket_of(requests: int) -> int:
    """Batches of nearly one size share a bucket: sizes grow by the square root of two."""
    return round(2 * math.log2(max(requests, 1)))


class Acceptance:
    """Discounted acceptance of each draft position, of one class of requests."""

    def __init__(self, drafts: int) -> None:
        self.trials, self.successes = [0.0] * drafts, [0.0] * drafts

    def learn(self, width: int, accepted: Sequence[int]) -> None:
        """Count a round of ``width`` with so many drafts accepted of each request."""
        keep = 0.5 ** (len(accepted) / HALF_LIFE)
        reached = len(accepted)
        for k in range(width - 1):
            if not reached:
                return
            passed = reached - accepted.count(k)
            self.trials[k] = keep * self.trials[k] + reached
            self.successes[k] = keep * self.successes[k] + passed
            reached = passed

    def expected(self) -> list[float]:
        """Expected tokens of one request in a round of every width, from 1 on.

        An unseen draft is as good as its last.
        """
        total = survives = 1.0
        found, a = [total], FIRST_PRIOR
        for passed, tried in zip(self.successes, self.trials, strict=True):
            a = (passed + PRIOR_TRIALS * a) / (tried + PRIOR_TRIALS)
            survives *= a
            total += survives
            found.append(total)
        return found

    def tokens(self, width: int) -> float:
        """Expected tokens of one request in a round of one width."""
        return self.expected()[width - 1]


class Answers:
    """How long answers are: what comes behind an answer's end is computed and thrown away."""

    def __init__(self) -> None:
        self._tokens = self._ended = self._behind = 0.0

    def learn(self, lengths: Sequence[int], behind: int) -> None:
        """Tokens of each answer that ended, without its prefill's; rows run behind an end."""
        keep = 0.5 ** (len(lengths) / ENDS_HALF_LIFE)
        self._tokens = keep * self._tokens + sum(lengths)
        self._ended = keep * self._ended + len(lengths)
        self._behind = keep * self._behind + behind

    def kept(self, tokens: float) -> float:
        """Of a request's expected ``tokens`` a round, those that its answer keeps.

        An answer's last round is cut, by (tokens - 1) / 2 on the average, and with overlap
        scheduling one more may have begun.
        """
        if not self._tokens:
            return tokens
        length = self._tokens / self._ended
        rounds = max((length + (tokens - 1) / 2) / tokens, 1.0) + self._behind / self._ended
        return length / rounds

    def ends(self, kept: float) -> float:
        """Answers that so many kept tokens end."""
        return kept * self._ended / self._tokens if self._tokens else 0.0


def _features(bucket: int, width: int) -> tuple[float, ...]:
    size = 2 ** (bucket / 2)
    return 1.0, size, size * width, float(width > 1)


def fit(cells: Cells, widths: Iterable[int]) -> tuple[float, ...] | None:
    """``bias + alpha size + theta size width + draft [width > 1]`` by least relative squares.

    Returns:
        The four coefficients; None before two sizes and every width were measured.
    """
    if len({b for b, _ in cells}) < 2 or {w for _, w in cells} < set(widths) or len(cells) < 4:
        return None
    seconds = np.array(list(cells.values()))
    rows = np.array([_features(*cell) for cell in cells]) / seconds[:, None]
    return tuple(np.linalg.lstsq(rows, np.ones(len(seconds)), rcond=None)[0].tolist())


def pass_alone(prefills: Iterable[tuple[int, float]]) -> float:
    """Seconds of a prefill pass that its tokens do not explain; 0 while nothing tells.

    Args:
        prefills: ``(tokens, seconds)`` of each.
    """
    tokens, seconds = np.array([*prefills], dtype=np.float64).reshape(-1, 2).T
    if len(tokens) < FEWEST_PREFILLS or np.ptp(tokens) == 0:
        return 0.0
    # Relative squares, as in :func:`fit`: a pass that the machine held up weighs little.
    at_zero = np.polyfit(tokens, seconds, 1, w=1 / seconds)[1]
    return float(np.clip(at_zero, 0.0, seconds.min()))


class Costs:
    """Seconds of a round by batch bucket and width, and of a prefill pass without its tokens.

    Args:
        shared: decisions read only what :meth:`take` was given: every rank of a tensor-parallel
            group must read the same, and another node's processor may round a fit otherwise.
        timed_alone: a round's time is its own. What else runs on the machine makes it longer, never
            shorter, and a width that is seldom tried has few: lower quartiles, not medians.
    """

    def __init__(
        self, widths: Sequence[int], shared: bool = False, timed_alone: bool = False
    ) -> None:
        self.widths, self.shared, self._alone = tuple(widths), shared, timed_alone
        self.samples: dict[Cell, deque[float]] = {}
        self.measured: dict[Cell, float] = {}
        self.cells: dict[Cell, float] = {} if shared else self.measured
        self._fit: tuple[float, ...] | None = None
        self._fitted = 0
        self.prefills: deque[tuple[int, float]] = deque(maxlen=PREFILLS)
        self.pass_alone = 0.0

    def add(self, bucket: int, width: int, seconds: float) -> None:
        kept = self.samples.setdefault((bucket, width), deque(maxlen=SAMPLES))
        kept.append(seconds)
        rank = (len(kept) - 1) // 4 if self._alone else len(kept) // 2
        self.measured[bucket, width] = sorted(kept)[rank]

    def refit(self) -> None:
        """Fit again what came; call it now and then."""
        if self.shared:
            return
        self.pass_alone = pass_alone(self.prefills)
        if len(self.cells) != self._fitted:
            self._fit, self._fitted = fit(self.cells, self.widths), len(self.cells)

    def table(self) -> Table:
        """What this rank has measured, to be shared."""
        return dict(self.measured), fit(self.measured, self.widths), pass_alone(self.prefills)

    def take(self, table: Table) -> None:
        """Decide by this from now on."""
        self.cells, self._fit, self.pass_alone = table

    def between(self, bucket: int) -> bool:
        """Whether smaller and larger batches were measured: what a fit can tell of."""
        buckets = [b for b, _ in self.cells]
        return bool(buckets) and min(buckets) <= bucket <= max(buckets)

    def of(self, bucket: int, width: int) -> float | None:
        """Seconds; None where nothing is known."""
        seconds = self.cells.get((bucket, width))
        if seconds is None and self._fit is not None:
            terms = zip(self._fit, _features(bucket, width), strict=True)
            estimate = sum(factor * feature for factor, feature in terms)
            seconds = estimate if estimate > 0 else None
        return seconds


def best_width(rates: Mapping[int, float], current: int) -> int:
    """The width with the largest rate, or ``current`` while that is nearly as good."""
    best = max(rates, key=rates.__getitem__)
    return current if rates.get(current, 0.0) * (1 + HYSTERESIS) >= rates[best] else best


class WidthPolicy:
    """The decision of one server; deterministic in what it was told.

    Args:
        widths: ascending. shared: see :class:`Costs`.
        timed_alone: every round's time is known, whatever was before it; fewer show as much.
    """

    def __init__(
        self, widths: Sequence[int], shared: bool = False, timed_alone: bool = False
    ) -> None:
        self.widths, self.width = tuple(widths), widths[-1]
        self._explore, self._look = (ALONE, ALONE) if timed_alone else (EXPLORE, PROBE)
        self.costs = Costs(widths, shared, timed_alone)
        # Greedy requests and sampled ones accept differently.
        self.classes = (Acceptance(widths[-1] - 1), Acceptance(widths[-1] - 1))
        self.answers = Answers()
        self.rates: dict[int, float] = {}
        self.rounds = self._since = self._turn = 0
        # By the batch's bucket: how many times fewer probes there are.
        self._patience: dict[int, int] = {}
        self._burst: list[int] = []
        self._tries: dict[Cell, tuple[int, int]] = {}

    def learn(
        self,
        width: int,
        greedy: Sequence[int],
        sampled: Sequence[int],
        lengths: Sequence[int] = (),
        behind: int = 0,
    ) -> None:
        """A round's result: accepted drafts of each request of either class.

        Args:
            lengths: of the answers that ended since the last. behind: rows of requests whose
                answer was over.
        """
        self.answers.learn(lengths, behind)
        for kind, accepted in zip(self.classes, (greedy, sampled), strict=True):
            if accepted:
                kind.learn(width, accepted)
        if width > self.width == 1:
            self._judge(width, [*greedy, *sampled])

    def _judge(self, width: int, accepted: Sequence[int]) -> None:
        """A probe that would have paid by itself is followed by others soon."""
        bucket = bucket_of(len(accepted))
        mine, one = (self.costs.of(bucket, w) for w in (width, 1))
        if accepted and mine and one and 1 + sum(accepted) / len(accepted) > mine / one:
            self._patience.clear()

    def next(self, greedy: int, sampled: int) -> int:
        """The next round's width for a batch of so many requests of either class."""
        self.rounds += 1
        self._since += 1
        bucket = bucket_of(greedy + sampled)
        if self.rounds % RETRY == 0:
            self.costs.refit()
        if not self._burst:
            self._decide(bucket, greedy, sampled)
        return self._burst.pop() if self._burst else self.width

    def _decide(self, bucket: int, greedy: int, sampled: int) -> None:
        seconds = {w: self.costs.of(bucket, w) for w in self.widths}
        if None in seconds.values() and self.costs.between(bucket):
            # Two sizes and every width tell of sizes between: no need to run the widest to know.
            self.costs.refit()
            seconds = {w: self.costs.of(bucket, w) for w in self.widths}
        for w in self.widths:
            if seconds[w] is None and self._may_explore((bucket, w)):
                self._burst = [w] * self._explore
                return
        kinds = zip(self.classes, (greedy, sampled), strict=True)
        present = [(kind.expected(), count) for kind, count in kinds if count]
        self.rates = {}
        for w, s in seconds.items():
            if s is not None:
                kept = sum([count * self.answers.kept(tokens[w - 1]) for tokens, count in present])
                self.rates[w] = kept / (s + self._prefill_share(kept))
        if not self.rates:
            return
        self.width = best_width(self.rates, self.width)
        self._probe(bucket)

    def _prefill_share(self, kept: float) -> float:
        """Seconds of the prefill pass that a round of so many kept tokens makes room for.

        Answers that end together share one pass; what their successors' prompts need is the same
        at every width and left out.
        """
        alone = self.costs.pass_alone
        return (1 - math.exp(-self.answers.ends(kept))) * alone if alone else 0.0

    def _may_explore(self, cell: Cell) -> bool:
        """A few attempts: rounds beside a prefill are not timed."""
        tries, last = self._tries.get(cell, (0, -RETRY))
        if tries >= ATTEMPTS or (tries and self.rounds - last < RETRY):
            return False
        self._tries[cell] = tries + 1, self.rounds
        return True

    def _probe(self, bucket: int) -> None:
        """Look at another width now and then; from width 1 at the next one only."""
        at = self.widths.index(self.width)
        others = self.widths[1:2] if self.width == 1 else self.widths[:at] + self.widths[at + 1 :]
        if not others:
            return
        other = others[self._turn % len(others)]
        rate, mine = self.rates.get(other), self.rates.get(self.width)
        if rate is None or mine is None:
            return
        loss = self._look * max(mine / rate - 1, 0.0)
        rounds = max(PROBE_EVERY, math.ceil(loss / PROBE_SHARE))
        patience = self._patience.get(bucket, 1) if self.width == 1 else 1
        if self._since >= rounds * patience:
            self._since, self._turn = 0, self._turn + 1
            self._patience[bucket] = min(2 * patience, MOST_PATIENCE) if self.width == 1 else 1
            self._burst = [other] * self._look

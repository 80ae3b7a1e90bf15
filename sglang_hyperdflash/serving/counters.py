"""Acceptance of each drafted position, as counters in the server's own ``/metrics``.

``P(position k accepted) = rate(accepted_drafts_total{position="k"}) / rate(verify_rounds_total)``
and ``tau = 1 + sum over k of that``. SGLang exports one mean length over a log interval, from which
neither can be recovered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from sglang_hyperdflash import is_ours
from sglang_hyperdflash.seams import Seam

ROUNDS = "hyperdflash:verify_rounds_total"
ACCEPTED = "hyperdflash:accepted_drafts_total"
BROKEN = "hyperdflash:broken_rows_total"
POSITION = "position"


class PositionCounters:
    """The two counter families of one scheduler process.

    Args:
        labels: SGLang's own label values for this scheduler (``model_name``, ``tp_rank``, ...).
        drafts: drafted positions of a round, one less than the block size.
        counter: the class to count with; None is ``prometheus_client.Counter``.
    """

    def __init__(self, labels: Mapping[str, object], drafts: int, counter: type | None = None):
        if counter is None:
            # prometheus_client chooses between memory and PROMETHEUS_MULTIPROC_DIR when it is
            # imported; SGLang sets the variable before it starts schedulers, not before plugins.
            import prometheus_client

            counter = prometheus_client.Counter

        rounds = counter(
            name=ROUNDS,
            documentation="Verification rounds, one for each request of a decoding batch.",
            labelnames=list(labels),
        )
        accepted = counter(
            name=ACCEPTED,
            documentation="Rounds in which the draft at this position was accepted (1 is first).",
            labelnames=[*labels, POSITION],
        )
        broken = counter(
            name=BROKEN,
            documentation="Requests ended with an error: NaN or infinity in the target's logits.",
            labelnames=list(labels),
        )
        self._rounds = rounds.labels(**labels)
        self._broken = broken.labels(**labels)
        # Every position has its series from the first round on: a missing one breaks sums.
        self._accepted = [
            accepted.labels(**labels, **{POSITION: str(k)}) for k in range(1, drafts + 1)
        ]

    def add(self, accepted_drafts: Sequence[int]) -> None:
        """Count one round of a batch: ``accepted_drafts`` of each request, without the bonus."""
        if not accepted_drafts:
            return
        reached = len(accepted_drafts)
        self._rounds.inc(reached)
        histogram = Counter(accepted_drafts)
        for before, counter in enumerate(self._accepted):
            reached -= histogram[before]
            if not reached:
                break
            counter.inc(reached)

    def add_broken(self, count: int) -> None:
        """Count requests that a broken row ended."""
        if count:
            self._broken.inc(count)


_counters: PositionCounters | None = None
# Broken rows not exported yet: the counters exist from the first round on.
_broken = 0


def count_broken() -> None:
    """Remember a request that a broken row ended; :func:`count_round` exports it."""
    global _broken
    _broken += 1


def count_round(tokens, self, result, batch) -> None:
    """Count what SGLang has just added to its requests' ``spec_correct_drafts_histogram``.

    Seam: ``SchedulerBatchResultProcessor._resolve_spec_v2_tokens``, once a batch and round, when
    the lengths are Python numbers already. Does nothing for other algorithms, without
    ``--enable-metrics``, and in schedulers whose metrics SGLang leaves out (tensor-parallel ranks
    other than 0). Never changes the tokens.
    """
    global _counters, _broken
    if not is_ours(batch.spec_algorithm):
        return
    if not self.metrics_reporter.current_scheduler_metrics_enabled:
        return
    if _counters is None:
        collector = self.metrics_collector
        _counters = PositionCounters(
            collector.labels,
            int(result.speculative_num_draft_tokens) - 1,
            # Set by SGLang's stat_loggers, which send its metrics elsewhere.
            getattr(collector, "_counter_cls", None),
        )
    _counters.add_broken(_broken)
    _broken = 0
    # The condition under which SGLang counts: with overlap a finished request runs once more.
    _counters.add(
        [
            accepted
            for req, accepted in zip(batch.reqs, result.num_correct_drafts_per_req_cpu, strict=True)
            if not (req.is_retracted or req.finished())
        ]
    )


SEAMS = (
    Seam(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ":SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        "after",
        count_round,
        ("self", "result", "batch"),
        "d79752842869",
        "per-position acceptance is not in SGLang's metrics",
    ),
)

"""Acceptance of each drafted position, as counters in the server's own ``/metrics``.

``P(draft k accepted)`` is the rate of ``accepted_drafts_total{position="k"}`` over that of
``drafted_total{position="k"}``, since narrow rounds draft fewer. ``tau`` is one plus the rate of
``accepted_drafts_total``, all positions, over that of ``verify_rounds_total``. SGLang exports one
mean length over a log interval, from which neither can be recovered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from sglang_hyperdflash import is_ours
from sglang_hyperdflash.seams import Seam
from sglang_hyperdflash.serving import width_metrics
from sglang_hyperdflash.serving.width_control import WidthControl

ROUNDS = "hyperdflash:verify_rounds_total"
ACCEPTED = "hyperdflash:accepted_drafts_total"
DRAFTED = "hyperdflash:drafted_total"
POSITION = "position"
# All that a server of ours exports.
FAMILIES = width_metrics.FAMILIES | {ROUNDS, ACCEPTED, DRAFTED}


class PositionCounters:
    """The counter families of one scheduler process.

    Args:
        labels: SGLang's own label values for this scheduler (``model_name``, ``tp_rank``, ...).
        drafts: drafted positions of the widest round, one less than the block size.
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
            documentation="Verification rounds, counted once per request in the decoding batch.",
            labelnames=list(labels),
        )
        accepted = counter(
            name=ACCEPTED,
            documentation="Drafts accepted at this position (1 is the first).",
            labelnames=[*labels, POSITION],
        )
        drafted = counter(
            name=DRAFTED,
            documentation="Drafts verified at this position (1 is the first).",
            labelnames=[*labels, POSITION],
        )
        self._rounds = rounds.labels(**labels)
        # Every position has its series from the start: a missing one breaks sums.
        positions = [{POSITION: str(k)} for k in range(1, drafts + 1)]
        self._accepted = [accepted.labels(**labels, **at) for at in positions]
        self._drafted = [drafted.labels(**labels, **at) for at in positions]

    def add(self, accepted_drafts: Sequence[int], width: int) -> None:
        """Count one round of a batch: ``accepted_drafts`` of each request, without the bonus."""
        if not accepted_drafts:
            return
        reached = len(accepted_drafts)
        self._rounds.inc(reached)
        for counter in self._drafted[: width - 1]:
            counter.inc(reached)
        histogram = Counter(accepted_drafts)
        for before, counter in enumerate(self._accepted):
            reached -= histogram[before]
            if not reached:
                break
            counter.inc(reached)


# None in a scheduler that exports nothing.
_counters: PositionCounters | None = None
_widths: width_metrics.WidthMetrics | None = None


def start_counting(_, self) -> None:
    """Create the families, so that the first request's end is counted too.

    Seam: ``Scheduler.init_batch_result_processor``, the first that has the worker and the metrics.
    Nothing is exported without ``--enable-metrics``, and in schedulers whose metrics SGLang leaves
    out (tensor-parallel ranks other than 0).
    """
    global _counters
    if is_ours(self.spec_algorithm) and self.metrics_reporter.current_scheduler_metrics_enabled:
        # A class set by SGLang's stat_loggers, which send its metrics elsewhere.
        own = getattr(self.metrics_collector, "_counter_cls", None)
        block = self.model_worker.width_control.block
        _counters = PositionCounters(self.metrics_collector.labels, block - 1, own)


def count_round(tokens, self, result, batch) -> None:
    """Count what SGLang has just added to its requests' ``spec_correct_drafts_histogram``.

    Seam: ``SchedulerBatchResultProcessor._resolve_spec_v2_tokens``, once a batch and round, when
    the lengths are Python numbers already. The result names its own width: another may be set by
    now. Does nothing for other algorithms. Never changes the tokens.
    """
    if not is_ours(batch.spec_algorithm):
        return
    # The condition under which SGLang counts: with overlap a finished request runs once more.
    pairs = zip(batch.reqs, result.num_correct_drafts_per_req_cpu, strict=True)
    live = [(req, n) for req, n in pairs if not (req.is_retracted or req.finished())]
    behind = sum(req.finished() for req in batch.reqs)
    width = int(result.speculative_num_draft_tokens)
    control = self.model_worker.width_control
    control.learn(width, live, behind)
    if _counters is not None:
        _counters.add([n for _, n in live], width)
        _export_width(self.metrics_collector, control, width)


def _export_width(collector, control: WidthControl, width: int) -> None:
    global _widths
    if _widths is None:  # before the first round there is no width to show
        classes = [getattr(collector, name, None) for name in ("_counter_cls", "_gauge_cls")]
        _widths = width_metrics.WidthMetrics(collector.labels, control.setting.widths, *classes)
    _widths.add(width, control)


SEAMS = (
    Seam(
        "sglang.srt.managers.scheduler:Scheduler.init_batch_result_processor",
        "after",
        start_counting,
        ("self",),
        "d8e5bb476566",
        "what ends the first request is counted too",
    ),
    Seam(
        "sglang.srt.managers.scheduler_components.batch_result_processor"
        ":SchedulerBatchResultProcessor._resolve_spec_v2_tokens",
        "after",
        count_round,
        ("self", "result", "batch"),
        "55fb7d0578fe",
        "per-position acceptance is not in SGLang's metrics",
    ),
)

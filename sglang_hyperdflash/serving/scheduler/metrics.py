"""Acceptance by position and the verify width, in the server's own ``/metrics``.

``P(draft k accepted)`` is the rate of ``accepted_drafts_total{position="k"}`` over that of
``drafted_total{position="k"}``, since narrow rounds draft fewer. ``tau`` is one plus the rate of
``accepted_drafts_total``, all positions, over that of ``verify_rounds_total``. SGLang exports one
mean length over a log interval, from which neither can be recovered.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from sglang_hyperdflash import is_ours
from sglang_hyperdflash.seams import after
from sglang_hyperdflash.serving.record.settings import BYTES, REASONS
from sglang_hyperdflash.serving.record.settings import REQUESTS as RECORDED_REQUESTS
from sglang_hyperdflash.serving.width.policy import WidthController

ROUNDS = "hyperdflash:verify_rounds_total"
ACCEPTED = "hyperdflash:accepted_drafts_total"
DRAFTED = "hyperdflash:drafted_total"
WIDTH_NOW = "hyperdflash:verify_width"
WIDTH_ROUNDS = "hyperdflash:width_rounds_total"
GAIN = "hyperdflash:width_gain"
SECONDS = "hyperdflash:round_seconds"
RECORDED = "hyperdflash:recorded_requests_total"
RECORDED_BYTES = "hyperdflash:recorded_bytes_total"
SHED = "hyperdflash:recording_shed_total"
DRAFTER = "hyperdflash:drafter_version"
COPIED, COPIES_ACCEPTED = "hyperdflash:copied_drafts_total", "hyperdflash:accepted_copies_total"
FAMILIES = {
    ROUNDS: "Verification rounds, counted once per request in the decoding batch.",
    ACCEPTED: "Drafts accepted at this position (1 is the first).",
    DRAFTED: "Drafts verified at this position (1 is the first).",
    WIDTH_ROUNDS: "Decoding rounds of the batch, by verify width.",
    WIDTH_NOW: "Current verify width: tokens verified per request in a round.",
    GAIN: "Expected tokens per second over those of width 1 (no speculation).",
    SECONDS: "Round duration in seconds, timed at the start.",
    RECORDED: "Requests recorded to the store.",
    RECORDED_BYTES: "Bytes recorded to the store.",
    SHED: "Requests that were to be recorded and were not, by reason.",
    COPIED: "Drafts that equal a copy from their request, from the first one on.",
    COPIES_ACCEPTED: "Those of them that were accepted.",
    DRAFTER: "Number of the drafter that was sent last; 0 is the one that the server started with.",
}
REASON = "reason"
POSITION, WIDTH, REQUESTS, SAMPLED = "position", "width", "requests", "sampled"
# Rounds between two values of the gain, each of which is written to a file.
GAIN_EVERY = 8


class Metrics:
    """The families of one scheduler process; every series but the gain exists from the start.

    Args:
        labels: SGLang's own label values for this scheduler (``model_name``, ``tp_rank``, ...).
        controller: of the worker; round times are exported as they were timed at the start.
        counter, gauge: the classes to use; None are ``prometheus_client``'s.
    """

    def __init__(
        self,
        labels: Mapping[str, object],
        controller: WidthController,
        counter: type | None = None,
        gauge: type | None = None,
    ) -> None:
        # prometheus_client chooses between memory and PROMETHEUS_MULTIPROC_DIR when it is
        # imported; SGLang sets the variable before it starts schedulers, not before plugins.
        import prometheus_client

        counter, gauge = counter or prometheus_client.Counter, gauge or prometheus_client.Gauge
        self._labels, self._controller = dict(labels), controller

        def family(kind: type, name: str, *more: str, **options: str):
            names = [*labels, *more]
            return kind(name=name, documentation=FAMILIES[name], labelnames=names, **options)

        self._counter = partial(family, counter)
        recent = {"multiprocess_mode": "mostrecent"}
        self._rounds = family(counter, ROUNDS).labels(**labels)
        # Every position has its series from the start: a missing one breaks sums.
        positions = [self._labels | {POSITION: str(k)} for k in range(1, controller.block)]
        self._accepted, self._drafted = (
            [by_position.labels(**each) for each in positions]
            for by_position in (family(counter, name, POSITION) for name in (ACCEPTED, DRAFTED))
        )
        self.drafter_version = family(gauge, DRAFTER, **recent).labels(**labels)
        self.drafter_version.set(0)
        copies = COPIED, COPIES_ACCEPTED
        self._copies = [family(counter, name).labels(**labels) for name in copies]
        by_width = family(counter, WIDTH_ROUNDS, WIDTH)
        self._gain = family(gauge, GAIN, **recent)
        seconds = family(gauge, SECONDS, REQUESTS, WIDTH, SAMPLED, **recent)
        self._width_now = family(gauge, WIDTH_NOW, **recent).labels(**labels)
        self._exported = self._turn = 0
        widths = controller.setting.widths
        self._by_width = {w: by_width.labels(**labels, **{WIDTH: str(w)}) for w in widths}
        policy = controller.policy
        for requests in policy.costs.sizes if policy and policy.costs else ():
            for sampled in (False, True):
                for width, value in policy.costs.of(requests, sampled).items():
                    cell = {REQUESTS: requests, WIDTH: width, SAMPLED: str(sampled).lower()}
                    seconds.labels(**labels, **cell).set(value)

    def recording(self) -> dict[str, object]:
        """The counters of a server that records, by the names that its recorder counts."""
        recorded, recorded_bytes = (self._counter(name) for name in (RECORDED, RECORDED_BYTES))
        counters = {
            RECORDED_REQUESTS: recorded.labels(**self._labels),
            BYTES: recorded_bytes.labels(**self._labels),
        }
        shed = self._counter(SHED, REASON)
        return counters | {name: shed.labels(**self._labels, reason=name) for name in REASONS}

    def add(self, accepted_drafts: Sequence[int], width: int) -> None:
        """Count a round of a batch: ``accepted_drafts`` of each request, without the bonus."""
        if width != self._exported:
            self._exported = width
            self._width_now.set(width)
        if width in self._by_width:
            self._by_width[width].inc()
        self._turn += 1
        gain = self._controller.predicted_gain() if self._turn % GAIN_EVERY == 1 else None
        if gain is not None:
            self._gain.labels(**self._labels).set(gain)
        reached = len(accepted_drafts)
        if not reached:
            return
        self._rounds.inc(reached)
        for counter in self._drafted[: width - 1]:
            counter.inc(reached)
        histogram = Counter(accepted_drafts)
        for before, counter in enumerate(self._accepted):
            reached -= histogram[before]
            if not reached:
                break
            counter.inc(reached)

    def add_copies(self, drafted: int, accepted: int) -> None:
        """Count drafts that were copies, and those of them that were accepted."""
        for counter, count in zip(self._copies, (drafted, accepted), strict=True):
            counter.inc(count)


@after("sglang.srt.managers.scheduler:Scheduler.init_batch_result_processor", "de5d77fb9b95")
def start_counting(_, self) -> None:
    """Create the families, so that every series exists before the first request.

    The hooked method is the first that has the worker and the metrics. SGLang leaves metrics out
    without ``--enable-metrics``, and on tensor-parallel ranks other than 0.
    """
    if is_ours(self.spec_algorithm) and self.metrics_reporter.current_scheduler_metrics_enabled:
        collector = self.metrics_collector
        # Classes set by SGLang's stat_loggers, which send its metrics elsewhere.
        classes = [getattr(collector, name, None) for name in ("_counter_cls", "_gauge_cls")]
        worker = self.model_worker
        worker.metrics = Metrics(collector.labels, worker.width_control, *classes)
        if worker.recorder is not None:
            worker.recorder.counters = worker.metrics.recording()


@after(
    "sglang.srt.managers.scheduler_components.metrics_reporter"
    ":SchedulerMetricsReporter.update_spec_metrics",
    "c44da490c47f",
)
def rate_what_was_drafted(_, self, *counts, **more) -> None:
    """Make the accept rate that SGLang logs and exports that of the drafts of all widths.

    It divides ``spec_num_correct_drafts``, which nothing else reads, by those of whole blocks.
    """
    if is_ours(self.scheduler.spec_algorithm):
        rounds, whole = self.spec_num_forward_ct, self.scheduler.model_worker.block - 1
        drafted, correct = self.spec_num_cap_tokens - rounds, self.spec_num_accept_tokens - rounds
        self.spec_num_correct_drafts = correct * rounds * whole / max(drafted, 1)


@after(
    "sglang.srt.managers.tokenizer_manager:TokenizerManager._calculate_spec_decoding_metrics",
    "8f1657dbeea4",
)
def count_an_answers_drafts(_, self, meta_info: dict[str, Any], recv_obj: Any, i: int) -> None:
    """Replace an answer's number of proposed drafts, which SGLang takes for whole blocks."""
    name = "spec_num_proposed_drafts"
    if is_ours(self.server_args.speculative_algorithm) and name in meta_info:
        meta_info[name] = drafted = recv_obj.spec_num_cap_tokens[i] - recv_obj.spec_verify_ct[i]
        meta_info["spec_accept_rate"] = recv_obj.spec_num_correct_drafts[i] / max(drafted, 1)

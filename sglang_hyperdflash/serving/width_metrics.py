"""The verify width in the server's own ``/metrics``: current value, rounds by width, gain."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_hyperdflash.serving.width_control import WidthControl

WIDTH_NOW = "hyperdflash:verify_width"
WIDTH_ROUNDS = "hyperdflash:width_rounds_total"
GAIN = "hyperdflash:width_gain"
SECONDS = "hyperdflash:round_seconds"
FAMILIES = frozenset((WIDTH_NOW, WIDTH_ROUNDS, GAIN, SECONDS))
LABEL, KIND, REQUESTS = "width", "kind", "requests"
# Rounds; a scrape comes once in hundreds.
GAUGES_EVERY = 8


class WidthMetrics:
    """The families of one scheduler process.

    Args:
        labels: SGLang's own label values. widths: all that a round may have.
        counter, gauge: the classes to use; None are ``prometheus_client``'s.
    """

    def __init__(
        self,
        labels: Mapping[str, object],
        widths: Sequence[int],
        counter: type | None = None,
        gauge: type | None = None,
    ) -> None:
        # Imported late: SGLang sets PROMETHEUS_MULTIPROC_DIR after it loads plugins.
        import prometheus_client

        counter, gauge = counter or prometheus_client.Counter, gauge or prometheus_client.Gauge
        names = list(labels)

        def new_gauge(name: str, documentation: str, *more: str):
            return gauge(
                name=name,
                documentation=documentation,
                labelnames=[*names, *more],
                multiprocess_mode="mostrecent",
            )

        rounds = counter(
            name=WIDTH_ROUNDS,
            documentation="Decoding rounds of the batch, by verify width.",
            labelnames=[*names, LABEL],
        )
        self._labels = dict(labels)
        self._now = new_gauge(
            WIDTH_NOW, "Current verify width: tokens verified per request in a round."
        ).labels(**labels)
        self._rounds = {w: rounds.labels(**labels, **{LABEL: str(w)}) for w in widths}
        gain = new_gauge(GAIN, "Throughput relative to width 1 (no speculation).", KIND)
        self._gains = [gain.labels(**labels, **{KIND: kind}) for kind in ("predicted", "measured")]
        self._seconds = new_gauge(
            SECONDS, "Round duration in seconds, by batch size and verify width.", REQUESTS, LABEL
        )
        self._cells: dict[tuple[int, int], Any] = {}
        self._turn = self._exported = 0

    def add(self, width: int, control: WidthControl) -> None:
        """Export one round's result and the policy's current estimates.

        Gains and seconds follow every few rounds only: each value is written to a file.
        """
        if width != self._exported:
            self._exported = width
            self._now.set(width)
        if width in self._rounds:
            self._rounds[width].inc()
        self._turn += 1
        if self._turn % GAUGES_EVERY != 1:
            return
        gains = control.predicted_gain(), control.measured_gain()
        for gauge, value in zip(self._gains, gains, strict=True):
            if value is not None:
                gauge.set(value)
        for cell, seconds in control.take_new_cells():
            if cell not in self._cells:
                names = {REQUESTS: str(cell[0]), LABEL: str(cell[1])}
                self._cells[cell] = self._seconds.labels(**self._labels, **names)
            self._cells[cell].set(seconds)

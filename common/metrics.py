"""The Prometheus series of a process, of those that common/series.py declares.

    metrics = Metrics("mac")
    metrics.add("prefill_seconds_total", 1.5, side="host")
    metrics.observe("stage_seconds", 0.2, side="worker", phase="tail")
    metrics.set("split_layer", 18)

A process registers only the series it owns, in a registry of its own, and each of them shows its zero from the start:
a rate over a series that appears late misses its first increment. Intervals are taken within one process, in seconds.
Opens no socket: services.runtime.exposition serves the registry.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics import MetricWrapperBase

from common.series import FROZEN_CAUSES, FROZEN_STATES, PLACES, PREFIX, PROCESSES, SERIES, Series

__all__ = ["FROZEN_CAUSES", "FROZEN_STATES", "PLACES", "PREFIX", "PROCESSES", "SERIES", "Metrics"]

_BY_NAME = {series.name: series for series in SERIES}
assert len(_BY_NAME) == len(SERIES), "a series is declared once"


class Metrics:
    """The series of one process. Asking for one that it does not own, or for an undeclared label, is a LookupError."""

    def __init__(self, process: str) -> None:
        self.process = process
        self.registry = CollectorRegistry()
        self._kinds: dict[str, MetricWrapperBase] = {}
        self._counted: dict[str, Counted] = {}
        for series in SERIES:
            if process in series.owners and series.counted:
                self._counted[series.name] = Counted(series, self.registry)
            elif process in series.owners:
                self._kinds[series.name] = _made(series, self.registry)

    def add(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Let a counter grow."""
        self._of(name, "counter", labels).inc(amount)

    def adder(self, name: str, **labels: str) -> Callable[[float], None]:
        """`add` of one counter with its labels looked up once: for what happens with every frame."""
        counter = self._of(name, "counter", labels)
        assert isinstance(counter, Counter)
        return counter.inc

    def set(self, name: str, value: float, **labels: str) -> None:
        """Give a gauge its value."""
        self._of(name, "gauge", labels).set(value)

    def set_state(self, name: str, label: str, state: str) -> None:
        """Give a gauge 1 at `state` and 0 at every other value of `label`."""
        for value in _BY_NAME[name].labels[label]:
            self.set(name, 1.0 if value == state else 0.0, **{label: value})

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Put one value into a histogram."""
        self._of(name, "histogram", labels).observe(value)

    def observe_counted(self, name: str, counts: Sequence[int], total: float, **labels: str) -> None:
        """Put values that another process counted into a histogram: one count a bucket and one above, and their sum."""
        if name not in self._counted:
            raise LookupError(f"{self.process} owns no histogram {name} that others count")
        self._counted[name].add(counts, total, labels)

    def _of(self, name: str, kind: str, labels: dict[str, str]) -> MetricWrapperBase:
        series = _BY_NAME.get(name)
        if series is None or name not in self._kinds:
            raise LookupError(f"{self.process} owns no series {name}")
        if series.kind != kind or labels.keys() != series.labels.keys():
            raise LookupError(
                f"{name} is a {series.kind} with labels {sorted(series.labels)}; got {sorted(labels)}"
            )
        if not labels:
            return self._kinds[name]
        return self._kinds[name].labels(
            **{label: _allowed(series, label, value) for label, value in labels.items()}
        )


def _allowed(series: Series, label: str, value: str) -> str:
    values = series.labels[label]
    if value in values:
        return value
    if "other" in values:
        return "other"
    raise LookupError(f"{series.name}: {label}={value!r} is not one of {', '.join(values)}")


class Counted:
    """A histogram, in the client library's terms a collector, whose values another process counted by its buckets."""

    def __init__(self, series: Series, registry: CollectorRegistry) -> None:
        self._series = series
        n = len(series.buckets) + 1
        self._cells = {values: [0.0] * n for values in itertools.product(*series.labels.values())}
        self._sums = dict.fromkeys(self._cells, 0.0)
        registry.register(self)

    def add(self, counts: Sequence[int], total: float, labels: dict[str, str]) -> None:
        """Counts by bucket, not cumulated."""
        if labels.keys() != self._series.labels.keys():
            raise LookupError(f"{self._series.name} has labels {sorted(self._series.labels)}")
        values = tuple(_allowed(self._series, label, labels[label]) for label in self._series.labels)
        self._cells[values] = [a + b for a, b in zip(self._cells[values], counts, strict=True)]
        self._sums[values] += total

    def collect(self) -> Iterator[HistogramMetricFamily]:
        """Called by the registry when it is read."""
        name, bounds = PREFIX + self._series.name, [*map(str, self._series.buckets), "+Inf"]
        family = HistogramMetricFamily(name, self._series.text, labels=tuple(self._series.labels))
        for values, cells in self._cells.items():
            buckets = list(zip(bounds, itertools.accumulate(cells), strict=True))
            family.add_metric(values, buckets, self._sums[values])
        yield family


_KINDS: dict[str, Callable[..., MetricWrapperBase]] = {
    "counter": Counter,
    "gauge": Gauge,
    "histogram": Histogram,
}


def _made(series: Series, registry: CollectorRegistry) -> MetricWrapperBase:
    """The client library's object of a series, with every combination of label values present at zero."""
    more = {"buckets": series.buckets} if series.buckets else {}
    made = _KINDS[series.kind](
        PREFIX + series.name, series.text, tuple(series.labels), registry=registry, **more
    )
    if series.labels:
        for values in itertools.product(*series.labels.values()):
            made.labels(*values)
    return made

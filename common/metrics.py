"""Every Prometheus series, declared once: name, kind, who owns it, what its labels may be.

    metrics = Metrics("mac")
    metrics.add("prefill_seconds_total", 1.5, side="host")
    metrics.observe("stage_seconds", 0.2, side="worker", phase="tail")
    metrics.set("split_layer", 18)

A process registers only the series it owns, in a registry of its own, and each of them shows its zero from the start:
a rate over a series that appears late misses its first increment. Label values are a closed list; where the list holds
"other", whatever is not in it counts there. Intervals are taken within one process, in seconds. Opens no socket:
services.runtime.exposition serves the registry.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import HistogramMetricFamily
from prometheus_client.metrics import MetricWrapperBase

from common.limits import FROZEN_ASK_BUCKETS_S

PREFIX = "outrigger_"
PROCESSES = ("gateway", "mac", "bridge")

SIDES = ("host", "worker")
ROUTES = ("generate", "link", "residual", "life", "hold", "pages", "attention")
DROP_REASONS = ("stale", "replayed", "foreign", "lost")
FAILURES = (
    "down",
    "deadline",
    "stale_epoch",
    "busy",
    "refused",
    "damaged",
    "memory",
    "suspended",
    "nonfinite",
    "order",
    "count",
    "range",
    "other",
)

FROZEN_STATES = ("queued", "building", "ready", "dropped", "failed")
FROZEN_CAUSES = (
    "disk",
    "memory",
    "thermal",
    "compile",
    "hang",
    "placement",
    "slow",
    "wrong",
    "rows",
    "other",
)

SHORT_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
STEP_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(frozen=True)
class Series:
    """One declared series. `labels` maps each label to the values it may have."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    owners: tuple[str, ...]
    text: str
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    counted: bool = False
    """Another process counts it by the buckets: grows by observe_counted."""


SERIES = (
    # --- gateway: what a client sees
    Series(
        "time_to_first_token_seconds",
        "histogram",
        ("gateway",),
        "Arrival of a request to its first token.",
        buckets=REQUEST_S,
    ),
    Series(
        "inter_token_latency_seconds",
        "histogram",
        ("gateway",),
        "Time between two tokens of one answer.",
        buckets=STEP_S,
    ),
    Series(
        "e2e_request_latency_seconds",
        "histogram",
        ("gateway",),
        "Arrival of a request to the end of its answer.",
        buckets=REQUEST_S,
    ),
    Series(
        "requests_total",
        "counter",
        ("gateway",),
        "Requests that ended, by how.",
        {"outcome": ("stop", "length", "cancelled", "refused", "busy", "deadline", "error")},
    ),
    Series("zmq_clients", "gauge", ("gateway",), "Clients of the public ZeroMQ endpoint."),
    Series(
        "zmq_dropped_total",
        "counter",
        ("gateway",),
        "ZeroMQ messages not used (malformed: answered with an error; refused: too many clients) or not delivered "
        "(gone: the client left; unread: it did not read, or gave no credit).",
        {"reason": ("malformed", "refused", "gone", "unread")},
    ),
    # --- mac: the model
    Series("requests_running", "gauge", ("mac",), "Requests that compute now."),
    Series("requests_waiting", "gauge", ("mac",), "Requests that wait for their turn."),
    Series(
        "prompt_tokens_total",
        "counter",
        ("mac",),
        "Prompt tokens, by where their rows came from (worker: it ran the tail layers).",
        {"source": ("cache", "host", "worker")},
    ),
    Series(
        "prefill_seconds_total",
        "counter",
        ("mac",),
        "Seconds of computing prompts, by side; both sides may run at once.",
        {"side": SIDES},
    ),
    Series(
        "prefix_divergence_total",
        "counter",
        ("mac",),
        "Prompts that parted from the rows at hand before their end, so that rows were lost, by likely cause.",
        {
            "cause": (
                "template_date",
                "system_prompt",
                "other_chat",
                "dropped_text",
                "edited_turn",
                "other_text",
            )
        },
    ),
    Series(
        "canonical_tokens_total",
        "counter",
        ("mac",),
        "Tokens of answers run again in idle time, so that the next turn can reuse their rows.",
    ),
    Series("generation_tokens_total", "counter", ("mac",), "Generated tokens."),
    Series("decode_seconds_total", "counter", ("mac",), "Seconds of computing generated tokens."),
    Series(
        "stage_seconds",
        "histogram",
        ("mac",),
        "One ubatch in one stage of the pipeline.",
        {"side": SIDES, "phase": ("head", "tail", "import", "round_trip")},
        STEP_S,
    ),
    Series(
        "bubble_seconds_total",
        "counter",
        ("mac",),
        "Seconds of a split read in which the host waited for the worker.",
    ),
    Series(
        "worker_state",
        "gauge",
        ("mac",),
        "1 for the state the worker is in, as the host sees it.",
        {"state": ("absent", "connecting", "ready", "resting", "refused")},
    ),
    Series(
        "worker_bypass_total",
        "counter",
        ("mac",),
        "Reads that stayed on the host, by reason.",
        {"reason": ("off", "absent", "refused", "rested", "small", "slow", "other")},
    ),
    Series(
        "worker_returned_total",
        "counter",
        ("mac",),
        "Split reads whose rest went back to the host, because the worker had become too slow.",
    ),
    Series(
        "worker_fallback_total",
        "counter",
        ("mac",),
        "Worker failures after which a read was redone on the host, by cause.",
        {"cause": FAILURES},
    ),
    Series("split_layer", "gauge", ("mac",), "First layer that the worker runs; 0 without a worker."),
    # --- bridge: the cable and the worker at its end
    Series(
        "link_bytes_total",
        "counter",
        ("bridge",),
        "Bytes over the cable (out: to the worker), by what they carried.",
        {"direction": ("in", "out"), "kind": ("residual", "rows", "control", "other")},
    ),
    Series(
        "link_frames_dropped_total",
        "counter",
        ("bridge",),
        "Frames and requests that were not used: of an earlier life of the link, or with a wrong hash.",
        {"reason": ("stale_epoch", "bad_hash")},
    ),
    Series("link_rtt_seconds", "histogram", ("bridge",), "Round trip of an empty frame.", buckets=SHORT_S),
    Series("worker_up", "gauge", ("bridge",), "1 while a worker is connected and accepted."),
    Series("worker_epoch", "gauge", ("bridge",), "Lives of the link since the bridge started."),
    Series(
        "worker_thermal_state",
        "gauge",
        ("bridge",),
        "Heat of the worker: 0 nominal, 1 fair, 2 serious, 3 critical.",
    ),
    Series("worker_available_bytes", "gauge", ("bridge",), "Memory that the worker says it has left."),
    # --- bridge: frozen pages, as the worker tells of them
    Series(
        "frozen_page_seconds",
        "histogram",
        ("bridge",),
        "One answer of one page program, by what runs it.",
        {"engine": ("coreml", "interpreter", "kernels", "other")},
        FROZEN_ASK_BUCKETS_S,
        counted=True,
    ),
    Series("frozen_pages", "gauge", ("bridge",), "Page programs, by state.", {"state": FROZEN_STATES}),
    Series(
        "frozen_failed_pages",
        "gauge",
        ("bridge",),
        "Page programs that failed, by the cause of their first failure.",
        {"cause": FROZEN_CAUSES},
    ),
    Series("frozen_keys_total", "counter", ("bridge",), "Keys that page programs answered for."),
    Series("frozen_builds_total", "counter", ("bridge",), "Page programs built, well or not."),
    Series("frozen_build_seconds_total", "counter", ("bridge",), "Seconds of building page programs."),
    # --- every process: the bus
    Series(
        "bus_dropped_total",
        "counter",
        PROCESSES,
        "Bus messages dropped or lost, by route and reason.",
        {"route": ROUTES, "reason": DROP_REASONS},
    ),
)

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

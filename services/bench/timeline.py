"""A read as bars on lanes: what host, link and worker did when, ubatch by ubatch.

Every interval was measured on one clock: the host's stages and the bridge's round trip where they happened, the
worker's waiting and computing on its own. What is left of a round trip is the link's, and is drawn in equal halves, out
and home; the worker's bars are placed by that. Pure; drawn by services.bench.drawing, called by services.cli.trace.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from common.wire.messages import UbatchTimes
from services.mac.read_log import LoggedRead

Lane = Literal["host", "link", "worker"]
LANES: tuple[Lane, ...] = ("host", "link", "worker")


@dataclass(frozen=True)
class Bar:
    """Something that took from at_s to at_s + seconds, counted from the start of the read. `ubatch` counts from 0."""

    lane: Lane
    what: Literal["whole", "head", "tail", "import", "out", "home"]
    ubatch: int
    position: int
    at_s: float
    seconds: float

    @property
    def end_s(self) -> float:
        return self.at_s + self.seconds


def bars_of(stages: tuple[UbatchTimes, ...]) -> list[Bar]:
    """All bars of a read, ubatch by ubatch."""
    return [bar for index, stage in enumerate(stages) for bar in _bars(index, stage)]


def _bars(index: int, stage: UbatchTimes) -> list[Bar]:
    def bar(lane: Lane, what: str, at_s: float, seconds: float) -> Bar:
        return Bar(lane, what, index, stage.position, at_s, seconds)  # type: ignore[arg-type]

    alone = not stage.worker_s and not stage.tail_s
    bars = [bar("host", "whole" if alone else "head", stage.head_at_s, stage.head_s)]
    if stage.worker_s:
        way_s = max(0.0, stage.round_trip_s - stage.queue_s - stage.worker_s) / 2
        begins_s = stage.sent_at_s + way_s + stage.queue_s
        bars += [
            bar("link", "out", stage.sent_at_s, way_s),
            bar("worker", "tail", begins_s, stage.worker_s),
            bar("link", "home", begins_s + stage.worker_s, way_s),
            bar("host", "import", stage.ack_at_s, stage.import_s),
        ]
    if stage.tail_s:
        bars.append(bar("host", "tail", stage.tail_at_s, stage.tail_s))
    return bars


def busy_s(bars: list[Bar], lane: Lane) -> float:
    """Seconds in which at least one bar lies on `lane`."""
    total = until = 0.0
    for bar in sorted((bar for bar in bars if bar.lane == lane), key=lambda bar: bar.at_s):
        total += max(0.0, bar.end_s - max(until, bar.at_s))
        until = max(until, bar.end_s)
    return total


def title_of(read: LoggedRead) -> str:
    """One line that says what was read and how."""
    report = read.report
    n_new = report.tokens_host + report.tokens_worker
    how = f"split at layer {report.split_layer} of {read.n_layer}" if report.split_layer else "host alone"
    notes = [f"not split: {report.bypass_reason}"] if report.bypass_reason else []
    notes += [f"worker failed: {', '.join(report.fallbacks)}"] if report.fallbacks else []
    notes += [f"{report.tokens_returned} tokens went back to the host"] if report.tokens_returned else []
    tail = f" ({'; '.join(notes)})" if notes else ""
    return (
        f"read {read.number} of {read.model}: {n_new:,} new tokens after {report.tokens_cache:,}, {how}, "
        f"{report.prefill_s:.3f} s{tail}"
    )


def chrome_trace(read: LoggedRead) -> str:
    """The read as JSON of the Trace Event Format, for chrome://tracing and Perfetto. Times are in microseconds."""
    name = {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": title_of(read)}}
    threads = [
        {"ph": "M", "pid": 1, "tid": tid, "name": "thread_name", "args": {"name": lane}}
        for tid, lane in enumerate(LANES, 1)
    ]
    events = [
        {
            "ph": "X",
            "pid": 1,
            "tid": LANES.index(bar.lane) + 1,
            "name": f"{bar.what} {bar.ubatch}",
            "cat": bar.lane,
            "ts": round(1e6 * bar.at_s, 3),
            "dur": round(1e6 * bar.seconds, 3),
            "args": {"ubatch": bar.ubatch, "position": bar.position},
        }
        for bar in bars_of(read.report.stages)
        if bar.seconds > 0
    ]
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": [name, *threads, *events]})

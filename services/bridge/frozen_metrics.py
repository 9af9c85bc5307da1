"""What a worker tells of its frozen pages, as series of this process: the worker exports none of its own.

A report counts since the worker's start; series grow by the difference to the last one, and from zero when the worker
was started again. Used by bridge.py.
"""

from __future__ import annotations

from common.metrics import FROZEN_CAUSES, FROZEN_STATES, Metrics
from common.wire.frozen import FrozenReport

NOTHING = FrozenReport(engine="", pages={})


class FrozenMetrics:
    """Takes reports of one worker after the other."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._last = NOTHING

    def take(self, report: FrozenReport) -> None:
        """One report more."""
        last = NOTHING if _started_again(self._last, report) else self._last
        self._last = report
        for state in FROZEN_STATES:
            self._metrics.set("frozen_pages", report.pages.get(state, 0), state=state)
        known = {cause: report.failed.get(cause, 0) for cause in FROZEN_CAUSES}
        known["other"] += sum(count for cause, count in report.failed.items() if cause not in known)
        for cause, count in known.items():
            self._metrics.set("frozen_failed_pages", count, cause=cause)
        self._metrics.add("frozen_keys_total", report.keys - last.keys)
        self._metrics.add("frozen_builds_total", report.builds - last.builds)
        self._metrics.add("frozen_build_seconds_total", max(0.0, report.build_s - last.build_s))
        before = last.asks or (0,) * len(report.asks)
        counts = [now - then for now, then in zip(report.asks, before, strict=True)]
        seconds = max(0.0, report.asks_s - last.asks_s)
        self._metrics.observe_counted("frozen_page_seconds", counts, seconds, engine=report.engine)

    def gone(self) -> None:
        """No worker is there any more, and so no page."""
        for state in FROZEN_STATES:
            self._metrics.set("frozen_pages", 0, state=state)
        for cause in FROZEN_CAUSES:
            self._metrics.set("frozen_failed_pages", 0, cause=cause)


def _started_again(last: FrozenReport, now: FrozenReport) -> bool:
    """Whether any count went back, or another kind of runtime counts."""
    if last.engine != now.engine or len(last.asks) != len(now.asks):
        return True
    pairs = [(last.keys, now.keys), (last.builds, now.builds), *zip(last.asks, now.asks, strict=True)]
    return any(now_count < last_count for last_count, now_count in pairs)

"""FrozenReport: what a worker tells of its frozen pages, in `mem` and in what the bridge says of the worker.

Counts since the worker's start: whoever makes rates of them takes differences. Declared here because three parties
share it: device/frozen_groups.py fills it, the control channel carries it, services/bridge exports it.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from common.wire.message import Part

Count = Annotated[int, Meta(ge=0)]
PAGES_TOLD_MAX = 64


class FrozenReport(Part, frozen=True):
    """Pages by state and failures by cause are what there is now; the others are counts since the start."""

    engine: str
    """What runs programs: coreml, interpreter, kernels."""
    pages: dict[str, Count]
    """State (queued, building, ready, dropped, failed) -> pages."""
    failed: dict[str, Count] = {}
    """Cause -> pages that failed by it."""
    first_errors: tuple[str, ...] = ()
    """In the words of the runtime, of the first failed pages."""
    keys: Count = 0
    """Keys that page programs answered for, summed over layers and queries."""
    builds: Count = 0
    build_s: Annotated[float, Meta(ge=0)] = 0.0
    asks: tuple[Count, ...] = ()
    """Answers of one page each, counted by seconds: limits.FROZEN_ASK_BUCKETS_S, and a last one for what is above."""
    asks_s: Annotated[float, Meta(ge=0)] = 0.0
    """Seconds of all of them."""
    page_ms: tuple[tuple[int, int, float], ...] = ()
    """(layer, group, mean milliseconds an answer) of up to PAGES_TOLD_MAX pages, the slowest first."""
    postponed: str = ""
    """Why nothing is built at the moment, if the device is the reason."""

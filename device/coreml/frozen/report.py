"""What frozen pages say of themselves: counts, causes, latencies. Plain numbers; the bridge exports them.

The worker exports no metrics of its own: this crosses the link (`pa_ane` of `mem`, the frozen_* fields of an attention
reply) and the bridge turns it into series. Called by FrozenPages.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field

from common.limits import FROZEN_ASK_BUCKETS_S


@dataclass
class Histogram:
    """Counts of seconds by FROZEN_ASK_BUCKETS_S (upper bounds; the last count is everything above)."""

    counts: list[int] = field(default_factory=lambda: [0] * (len(FROZEN_ASK_BUCKETS_S) + 1))
    total_s: float = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(FROZEN_ASK_BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    @property
    def count(self) -> int:
        return sum(self.counts)

    @property
    def mean_s(self) -> float:
        return self.total_s / self.count if self.count else 0.0


@dataclass(frozen=True)
class FrozenReport:
    """A snapshot. `asks` are by engine, `page_mean_s` by (layer, page)."""

    pages: dict[str, int]
    failed: dict[str, int]
    first_errors: tuple[str, ...]
    keys_served: int
    asks: dict[str, Histogram]
    page_mean_s: dict[tuple[int, int], float]
    builds: int
    build_seconds: float
    postponed: str | None

    def text(self) -> str:
        """One line for a person: what is ready, what failed and why, what waits."""
        parts = [f"{count} {state}" for state, count in self.pages.items() if count]
        parts += [f"failed by {cause}: {count}" for cause, count in self.failed.items()]
        if self.postponed:
            parts.append(f"waiting: {self.postponed}")
        return ", ".join(parts) or "no pages"

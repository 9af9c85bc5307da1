"""What a read will do, decided before it starts: its ubatches, and how many of them the worker takes part in.

Pure: the state of the link and of the rest timer are passed in. The last ubatch always stays on the host, so that
logits never cross the cable. Called by services.mac.compute and services.mac.read.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from services.mac.grid import Ubatch, cut_read

BypassReason = Literal["", "off", "absent", "refused", "rested", "small", "slow"]
WorkerStanding = Literal["ready", "off", "absent", "refused", "rested"]
"""How the worker stands when the read starts: usable, or the reason why not."""


@dataclass(frozen=True)
class ReadPlan:
    """Ubatches of one read in order; the first `n_remote` run their tail layers on the worker."""

    ubatches: tuple[Ubatch, ...]
    n_remote: int
    bypass_reason: BypassReason

    @property
    def start(self) -> int:
        return self.ubatches[0].position

    @property
    def end(self) -> int:
        return self.ubatches[-1].end

    @property
    def tokens_worker(self) -> int:
        """Tokens whose tail layers the worker runs."""
        return sum(ubatch.n_tokens for ubatch in self.ubatches[: self.n_remote])


def plan_read(
    start: int, end: int, *, worker: WorkerStanding, split_tokens_min: int, split_end: int | None = None
) -> ReadPlan:
    """Plan reading positions [start, end); `start` is a grid point.

    The worker takes part when it is ready and at least `split_tokens_min` tokens are new; the grid is the same
    either way. Ubatches that end behind split_end stay on the host, whose pages are elsewhere by then.
    """
    ubatches = cut_read(start, end)
    if worker != "ready":
        return ReadPlan(ubatches, 0, worker)
    if end - start < split_tokens_min or len(ubatches) < 2:
        return ReadPlan(ubatches, 0, "small")
    n_remote = sum(split_end is None or ubatch.end <= split_end for ubatch in ubatches[:-1])
    return ReadPlan(ubatches, n_remote, "" if n_remote else "small")


def plan_without_worker(plan: ReadPlan) -> ReadPlan:
    """The same read on the host alone, for running it again after the worker failed."""
    return ReadPlan(plan.ubatches, 0, "rested")

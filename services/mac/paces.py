"""How fast both sides are, learned from every read: seconds of one layer over one ubatch, by position in the context.

Attention takes longer the more keys there are, so each side's pace is a line over the position, fitted to the newest
stages. From it come the stage times of any split layer. Pure; used by services.mac.pairing.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from common.limits import UBATCH_TOKENS
from common.wire.messages import ReadReport, UbatchTimes
from services.mac.choose import StageTimes

FORGET = 0.9
"""Weight that earlier observations keep with each new one."""
SCALE_TOKENS = 4096.0
STIFFNESS = 0.5
"""Resistance of the slope, in units of the observations' spread: positions that lie together give no slope."""


class Line:
    """value = a + b * position, by least squares over observations that are forgotten slowly; b is never negative."""

    def __init__(self) -> None:
        self._n = self._x = self._y = self._xx = self._xy = 0.0

    @property
    def known(self) -> bool:
        return self._n > 0

    def add(self, position: float, value: float) -> None:
        """Learn one value at `position` tokens."""
        x = position / SCALE_TOKENS
        self._n = FORGET * self._n + 1
        self._x = FORGET * self._x + x
        self._y = FORGET * self._y + value
        self._xx = FORGET * self._xx + x * x
        self._xy = FORGET * self._xy + x * value

    def at(self, position: float) -> float:
        """The value expected at `position`; only when known."""
        mean_x, mean_y = self._x / self._n, self._y / self._n
        spread = max(0.0, self._xx / self._n - mean_x**2)
        slope = max(0.0, self._xy / self._n - mean_x * mean_y) / (spread + STIFFNESS)
        return max(mean_y / 4, mean_y + slope * (position / SCALE_TOKENS - mean_x))


@dataclass
class Mean:
    """A mean that forgets slowly."""

    _n: float = 0.0
    _sum: float = 0.0

    def add(self, value: float) -> None:
        self._n, self._sum = FORGET * self._n + 1, FORGET * self._sum + value

    @property
    def value(self) -> float:
        return self._sum / self._n if self._n else 0.0


class Paces:
    """What is known of the two sides of one model of n_layer layers."""

    def __init__(self, n_layer: int) -> None:
        self._n_layer = n_layer
        self._host, self._worker = Line(), Line()
        self._link_s, self._import_s = Mean(), Mean()

    @property
    def known(self) -> bool:
        """Both sides have been timed."""
        return self._host.known and self._worker.known

    def learn(self, report: ReadReport, split_layer: int) -> None:
        """Take in the stages of a read. split_layer: where the host cuts, also when this read was not split."""
        for stage in _whole(report.stages):
            if stage.worker_s or stage.tail_s:
                self._host.add(stage.position, stage.head_s / split_layer)
            else:
                self._host.add(stage.position, stage.head_s / self._n_layer)
            if stage.worker_s:
                n_tail = self._n_layer - split_layer
                self._worker.add(stage.position, stage.worker_s / n_tail)
                self._link_s.add(max(0.0, stage.round_trip_s - stage.queue_s - stage.worker_s))
                self._import_s.add(stage.import_s)

    @property
    def worker_known(self) -> bool:
        """The worker has been timed."""
        return self._worker.known

    @property
    def host_known(self) -> bool:
        """The host has been timed."""
        return self._host.known

    def learn_host(self, position: int, seconds: float, n_layer: int) -> None:
        """Take in that n_layer layers of the host took so long over one ubatch at `position`."""
        self._host.add(position, seconds / n_layer)

    def learn_link(self, token_ms: float, rtt_us: float, n_layer: int) -> None:
        """Take in what the bridge measured when the link came up: a round trip, and the worker's n_layer layers over a
        token of its second ubatch. The bytes' own time on the cable comes with the first read.
        """
        self._worker.add(UBATCH_TOKENS, token_ms / 1000 * UBATCH_TOKENS / n_layer)
        self._link_s.add(rtt_us / 1e6)

    def forget_worker(self) -> None:
        """It is another one, or not what it was."""
        self._worker, self._link_s, self._import_s = Line(), Mean(), Mean()

    def times(self, split_layer: int, position: float) -> StageTimes:
        """Stage times of one ubatch at `position` when split there; only when known."""
        host_s, worker_s = self._host.at(position), self._worker.at(position)
        n_tail = self._n_layer - split_layer
        return StageTimes(
            head_s=host_s * split_layer,
            tail_s=host_s * n_tail,
            worker_s=worker_s * n_tail,
            link_s=self._link_s.value,
            import_s=self._import_s.value,
        )


def _whole(stages: Iterable[UbatchTimes]) -> list[UbatchTimes]:
    """Full ubatches, which alone are comparable; of several, not the first, which may have built its graphs."""
    full = [stage for stage in stages if stage.n_tokens == UBATCH_TOKENS]
    return full[1:] or full

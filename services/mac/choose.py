"""How long a read will take, and from that: where to split, how many ubatches the worker gets, when to stop giving.

The host runs the head layers of one ubatch after the other; the worker runs the tail of each as soon as it has its
residual; tails that the worker does not get run on the host once the worker's rows are home. Times within a read count
as constant, so that every answer here is arithmetic. Pure; tests/services/mac/test_choose.py holds it against a
simulation. Called by services.mac.guard (during a read) and services.mac.tuner (between reads).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

GAIN_MIN = 0.05
"""A plan counts as better only when it takes at least this share less time."""
CHANGE_MIN = 0.02
"""Another split layer is taken only when it makes reads at least so much shorter: a change empties the mirror."""
LOSS_MAX = 0.03
"""Share of the host's own time that a read may lose to waiting for a worker that became slow."""


@dataclass(frozen=True)
class StageTimes:
    """Seconds that one ubatch takes in each stage."""

    head_s: float
    """Layers before the split on the host."""
    tail_s: float
    """The other layers, on the host."""
    worker_s: float
    """The same layers on the worker."""
    link_s: float = 0.0
    """From sending to the rows being home, less the worker's computing and queueing."""
    import_s: float = 0.0
    """Taking the worker's rows over, on the host's time."""

    @property
    def alone_s(self) -> float:
        """One ubatch on the host alone."""
        return self.head_s + self.tail_s


@dataclass(frozen=True)
class Outlook:
    """A split read at one moment. Ubatches whose tail is done, here or there, do not count any more."""

    times: StageTimes
    heads_left: int
    """Ubatches whose head layers have not run."""
    n_ready: int
    """Ubatches through the head, and not sent."""
    n_in_flight: int
    busy_s: float = 0.0
    """Until the worker has done the first of those in flight, or whatever else keeps it from the first chunk."""
    n_redone: int = 0
    """Ubatches whose rows are home, and whose tail the host would have to repeat if it gave up those in flight."""
    elapsed_s: float = 0.0
    """Since the read began."""
    alone_s: float = math.inf
    """What the whole read would take on the host alone."""

    @property
    def n_more_max(self) -> int:
        """Chunks that could still be sent: all but the last ubatch."""
        return max(0, self.heads_left + self.n_ready - 1)


def finish_s(now: Outlook, n_more: int) -> float:
    """Seconds until the read is through when `n_more` further chunks go to the worker."""
    times, one_way_s = now.times, now.times.link_s / 2
    step_s = times.head_s + times.import_s
    worker_s = now.busy_s + max(0, now.n_in_flight - 1) * times.worker_s
    n_at_once = min(n_more, now.n_ready)
    if n_at_once:
        worker_s = max(worker_s, one_way_s) + n_at_once * times.worker_s
    if n_later := n_more - n_at_once:
        # Residuals arrive step_s apart: either the worker, or the first of them, or the last of them sets the pace.
        worker_s = max(
            worker_s + n_later * times.worker_s,
            step_s + one_way_s + n_later * times.worker_s,
            n_later * step_s + one_way_s + times.worker_s,
        )
    home_s = worker_s + one_way_s if n_more or now.n_in_flight else 0.0
    n_tails = now.heads_left + now.n_ready - n_more
    return max(now.heads_left * step_s, home_s) + n_tails * times.tail_s


def abandoned_s(now: Outlook) -> float:
    """Seconds until the read is through when the host gives up what is in flight and runs all other tails itself."""
    n_tails = now.heads_left + now.n_ready + now.n_in_flight + now.n_redone
    return now.heads_left * now.times.head_s + n_tails * now.times.tail_s


def chunks_to_send(now: Outlook) -> int:
    """How many further chunks to give the worker: all that may go, unless fewer are better by GAIN_MIN."""
    most = now.n_more_max
    all_s = finish_s(now, most)
    best = min(range(most + 1), key=lambda n_more: (finish_s(now, n_more), -n_more))
    return best if finish_s(now, best) < (1 - GAIN_MIN) * all_s else most


def should_abandon(now: Outlook) -> bool:
    """Whether to give up what is in flight, there being nothing else to do than to wait for it.

    Waiting ends where it is predicted to take longer, and at the latest where the read would lose more than LOSS_MAX of
    the host's own time if the worker never answered. Before the first chunk is out (the mirror is being brought up to
    date, or the worker still ends what an earlier read gave up) only the prospect of a gain is worth waiting for.
    """
    here_s = abandoned_s(now)
    if now.elapsed_s + here_s > (1 + LOSS_MAX) * now.alone_s:
        return True
    if not now.n_in_flight:
        with_worker_s = (finish_s(now, n_more) for n_more in range(1, now.n_more_max + 1))
        return min(with_worker_s, default=math.inf) > (1 - GAIN_MIN) * here_s
    return here_s < (1 - GAIN_MIN) * finish_s(now, chunks_to_send(now))


@dataclass(frozen=True)
class Choice:
    """A split layer and what a read of so many ubatches is predicted to take with it."""

    layer: int
    split_s: float
    alone_s: float

    @property
    def gain(self) -> float:
        """Share of the host's own time that the worker saves; negative when it costs time."""
        return 1 - self.split_s / self.alone_s if self.alone_s else 0.0


def predict(layer: int, n_ubatches: int, times: StageTimes, sync_s: float = 0.0) -> Choice:
    """What a read of n_ubatches takes when split at `layer` and given to the worker as far as that is good.

    sync_s: what bringing the mirror up to date takes, during which the host runs head layers already.
    """
    start = Outlook(times, heads_left=n_ubatches, n_ready=0, n_in_flight=0, busy_s=sync_s)
    split_s = finish_s(start, chunks_to_send(start))
    return Choice(layer, split_s, n_ubatches * times.alone_s)


def choose_layer(
    layers: Iterable[int], n_ubatches: int, times: Callable[[int], StageTimes], current: int
) -> Choice:
    """The best of `layers` for reads of n_ubatches; `current` unless another is better by CHANGE_MIN of its time."""
    choices = [predict(layer, n_ubatches, times(layer)) for layer in layers]
    best = min(choices, key=lambda choice: choice.split_s)
    held = next((choice for choice in choices if choice.layer == current), None)
    if held is None or best.split_s < (1 - CHANGE_MIN) * held.split_s:
        return best
    return held


def window_for(times: StageTimes, most: int) -> int:
    """Fewest chunks in flight that keep the worker busy: one it computes, and those whose way takes that long."""
    if times.worker_s <= 0:
        return most
    on_the_way = math.ceil((times.link_s + times.import_s) / times.worker_s)
    return min(most, max(2, 1 + on_the_way))

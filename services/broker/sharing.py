"""Which groups of pages which worker holds: one run of groups each, by speed and granted memory. Pure functions.

Groups only ever come at the end, and a worker numbers its pages from its first one, so that another first group means
to begin anew. Therefore runs are left as they are while the slowest is at most UNEVEN times as late as it need be, and
the newest groups go to the last run. Called by broker.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

PACE_S_MIN = 1e-9
UNEVEN = 1.5
"""With equal workers a run is moved when the conversation has grown to about twice what it was at the last move."""
LEFT_OVER = 4.0
"""What a group counts that no worker holds, against one of the slowest worker's: the host attends it from the disk."""


@dataclass(frozen=True)
class WorkerRoom:
    """What is known of one worker that can hold pages."""

    worker: int
    pace_s: float
    """Seconds of its own work for a group, of the same query as the others'; 0: not measured yet."""
    tokens_max: int
    """Keys of every layer that it granted room for."""
    group_first: int | None = None
    """Where its run begins; None: it has none."""
    wait_s: float = 0.0
    """Seconds of the way to it and back, however many groups it attends."""

    def done_s(self, n_groups: int) -> float:
        """When it has answered for so many groups."""
        return self.wait_s + n_groups * self.pace_s if n_groups else 0.0


@dataclass(frozen=True)
class Share:
    """The groups [group_first, group_end) are for one worker."""

    worker: int
    group_first: int
    group_end: int


def plan_shares(
    n_groups: int, workers: Sequence[WorkerRoom], group_tokens: int, *, may_move: bool = True
) -> list[Share]:
    """One run of the groups [0, n_groups) a worker, some of them empty, in the order of the groups.

    may_move: whether a run may begin elsewhere than it does now, when that evens things out.
    """
    newest = max((each.group_first or 0 for each in workers), default=0) + 1
    ordered = sorted(
        workers, key=lambda each: (newest if each.group_first is None else each.group_first, each.worker)
    )
    as_is, even = _grown(n_groups, ordered, group_tokens), shares(n_groups, ordered, group_tokens)
    late_as_is, late_even = _late(as_is, ordered, n_groups), _late(even, ordered, n_groups)
    firsts = {each.worker: each.group_first for each in ordered}
    moves = any(
        firsts[share.worker] is not None
        and (share.group_first != firsts[share.worker] or share.group_end == share.group_first)
        for share in even
    )
    if not moves:
        is_first = all(first is None for first in firsts.values())  # as it is, nobody would hold anything
        return even if is_first or late_even < late_as_is else as_is
    return even if may_move and late_as_is > UNEVEN * late_even else as_is


def shares(n_groups: int, workers: Sequence[WorkerRoom], group_tokens: int) -> list[Share]:
    """Cut the groups [0, n_groups) into one run a worker, so that all are done at about the same time.

    Never beyond what was granted: what fits nobody is left over at the end, and the host attends it from the journal. A
    worker that was not measured counts as the slowest of the others, and one whose way is longer than all the work of
    the others gets nothing.
    """
    paced, counts = _paced(workers), [0] * len(workers)
    rooms = [_room(each, group_tokens) for each in workers]
    for _ in range(min(n_groups, sum(rooms))):
        able = [index for index, room in enumerate(rooms) if counts[index] < room]
        counts[min(able, key=lambda index: paced[index].done_s(counts[index] + 1))] += 1
    made, first = [], 0
    for each, count in zip(workers, counts, strict=True):
        made.append(Share(each.worker, first, first + count))
        first += count
    return made


def _grown(n_groups: int, ordered: Sequence[WorkerRoom], group_tokens: int) -> list[Share]:
    """The runs where they begin now, each as far as the next one or its room; workers without a run get none."""
    made, at = [], 0
    firsts = [each.group_first for each in ordered if each.group_first is not None]
    ends = [*firsts[1:], n_groups]
    for index, each in enumerate(ordered):
        if each.group_first is None or each.group_first < at:
            made.append(Share(each.worker, at, at))
            continue
        first = min(each.group_first, n_groups)
        at = max(first, min(ends[index], n_groups, first + _room(each, group_tokens)))
        made.append(Share(each.worker, first, at))
    return made


def _late(made: Sequence[Share], ordered: Sequence[WorkerRoom], n_groups: int) -> float:
    """When the last of them, or the host with what is left over, is done."""
    paced = _paced(ordered)
    counts = [share.group_end - share.group_first for share in made]
    slowest = max((each.pace_s for each in paced), default=1.0)
    times = [each.done_s(count) for each, count in zip(paced, counts, strict=True)]
    return max([*times, LEFT_OVER * (n_groups - sum(counts)) * slowest])


def _paced(workers: Sequence[WorkerRoom]) -> list[WorkerRoom]:
    """The same with a pace for each, those not measured as slow as the slowest."""
    slowest = max((each.pace_s for each in workers), default=0.0) or 1.0
    return [replace(each, pace_s=max(each.pace_s or slowest, PACE_S_MIN)) for each in workers]


def _room(each: WorkerRoom, group_tokens: int) -> int:
    return max(0, each.tokens_max // group_tokens)

"""How many groups the host should let go, and which groups which worker holds. Pure functions of numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


def release_end(
    *, n_tokens: int, group_first: int, groups_kept: int, group_tokens: int, host_tokens: int
) -> int:
    """The group up to which the host should free its memory; group_first when nothing is to go.

    n_tokens: of the sequence. group_first: the host holds the groups from here on. groups_kept: the journal has all
    pages of the groups [0, groups_kept). host_tokens: the limit. Ahead of need: from the limit on there is always room
    for one group more, so that no step waits for a release. The group of the newest token stays.
    """
    if n_tokens < host_tokens or n_tokens == 0:
        return group_first
    in_memory = n_tokens - group_first * group_tokens
    too_many = max(0, in_memory + group_tokens - host_tokens)
    wanted = group_first - (-too_many // group_tokens)
    return max(group_first, min(wanted, groups_kept, (n_tokens - 1) // group_tokens))


@dataclass(frozen=True)
class WorkerRoom:
    """What is known of one worker that can hold pages."""

    worker: int
    bytes_per_s: float
    """Measured while pages were given to it; 0: not measured yet."""
    tokens_max: int
    """Keys of every layer that it granted room for."""


@dataclass(frozen=True)
class Share:
    """The groups [group_first, group_end) are for one worker."""

    worker: int
    group_first: int
    group_end: int


def shares(n_groups: int, workers: Sequence[WorkerRoom], group_tokens: int) -> list[Share]:
    """Cut the groups [0, n_groups) into one run a worker, oldest first, by speed and never beyond what was granted.

    What fits nobody is left over at the end: the host attends it from the journal. A worker that was not measured
    counts as the slowest of the others. Every worker gets its rounded share; what rounding or a small grant leaves over
    goes to the fastest with room.
    """
    rooms = [max(0, each.tokens_max // group_tokens) for each in workers]
    measured = [each.bytes_per_s for each in workers if each.bytes_per_s > 0]
    speeds = [each.bytes_per_s or min(measured, default=1.0) for each in workers]
    counts = [0] * len(workers)
    if total := sum(speed for speed, room in zip(speeds, rooms, strict=True) if room):
        counts = [min(room, int(n_groups * speed / total)) for speed, room in zip(speeds, rooms, strict=True)]
    left = n_groups - sum(counts)
    for index in sorted(range(len(workers)), key=lambda i: -speeds[i]):
        more = min(left, rooms[index] - counts[index])
        counts[index] += more
        left -= more
    made, first = [], 0
    for each, count in zip(workers, counts, strict=True):
        made.append(Share(each.worker, first, first + count))
        first += count
    return made

"""Which grid points of a sequence are worth a kept recurrent state: where a later prompt is likely to part from it.

A recurrent state cannot be cut, so a hybrid model goes back to kept points only. Prompts part from each other at turn
borders (a regenerated or edited turn, reasoning that the template leaves out), so those come first, newest first; what
room is left is spread evenly. Pure functions over token counts and ids. Called by services.mac.sequence.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

import numpy as np
from numpy.typing import NDArray

from common.limits import UBATCH_TOKENS
from services.mac.grid import grid_floor

POINTS_MAX = 256
"""Most kept points of a sequence, however small its states are."""


def turn_borders(tokens: NDArray[np.int32], turn_end_ids: Collection[int]) -> list[int]:
    """Positions right after each token of `tokens` i32 [n] that ends a turn, oldest first."""
    if not turn_end_ids:
        return []
    return [int(at) + 1 for at in np.flatnonzero(np.isin(tokens, list(turn_end_ids)))]


def points_worth_keeping(
    end: int,
    needed: Iterable[int],
    borders: Iterable[int],
    capacity: int,
    pairs_from: int | None = None,
) -> frozenset[int]:
    """At most `capacity` grid points in (0, end], the most useful ones.

    needed: points to take before all others, such as the prompt's own end. borders: positions of turn borders, each
    served by the grid point before it. What room borders leave (at least half of it) is spread over the sequence at the
    smallest power-of-two multiple of the grid that fits, so that a growing sequence goes on wanting the same points.
    pairs_from: from there on two ubatches may run staggered; a state between them would keep them from it, so that the
    spread leaves those out.
    """
    capacity = min(capacity, POINTS_MAX)
    chosen = _newest(needed, end, capacity)
    room = capacity - len(chosen)
    floors = {grid_floor(border) for border in borders} - chosen
    chosen |= _newest(floors, end, room - room // 2)
    room = capacity - len(chosen)
    if room:
        stride = UBATCH_TOKENS
        while end // stride > room:
            stride *= 2
        chosen |= {point for point in range(stride, end + 1, stride) if not _parts_pair(point, pairs_from)}
    return frozenset(chosen)


def _parts_pair(point: int, pairs_from: int | None) -> bool:
    return pairs_from is not None and point > pairs_from and point % (2 * UBATCH_TOKENS) != 0


def _newest(points: Iterable[int], end: int, n: int) -> set[int]:
    inside = sorted((point for point in set(points) if 0 < point <= end), reverse=True)
    return set(inside[:n])

"""The grid law as arithmetic: where a read is cut, which of its points are canonical, what a new prompt may reuse.

A row is *canonical* when it was computed in exactly the ubatch a cold read of its token ids would have put it in.
Only then does a reused prefix give the same bits as reading it again. Pure functions over token counts; knows
nothing of layers or engines. Called by services.mac.plan and services.mac.sequence.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from common.engine.grid import canonical_end as canonical_end
from common.engine.grid import cut
from common.limits import UBATCH_TOKENS


class Ubatch(NamedTuple):
    """Tokens [position, position + n_tokens) of a sequence, run in one pass."""

    position: int
    n_tokens: int

    @property
    def end(self) -> int:
        return self.position + self.n_tokens


def grid_floor(position: int) -> int:
    """The last grid point at or before `position`."""
    return position - position % UBATCH_TOKENS


def cut_read(start: int, end: int) -> tuple[Ubatch, ...]:
    """Cut [start, end) at the grid points; a lone last row takes one row from the ubatch before it.

    `start` is a grid point (else ValueError). The law itself is common/engine/grid.py's.
    """
    return tuple(Ubatch(*piece) for piece in cut(start, end))


def reuse_limit(n_prompt: int) -> int:
    """Last grid point at which a cold read of `n_prompt` tokens is cut with at least its last ubatch after it."""
    return grid_floor(cut_read(0, n_prompt)[-1].position)


def common_prefix(a: NDArray[np.int32], b: NDArray[np.int32]) -> int:
    """How many leading token ids two sequences share."""
    n = min(len(a), len(b))
    differs = np.flatnonzero(a[:n] != b[:n])
    return int(differs[0]) if differs.size else n


def reuse_point(
    held: NDArray[np.int32], prompt: NDArray[np.int32], restorable: Collection[int] | None
) -> int:
    """Where reading `prompt` may start when the canonical rows of `held` are at hand; 0 means from the beginning.

    restorable: positions to which recurrent layers can go back; None when there are none and any point will do.
    """
    point = min(grid_floor(common_prefix(held, prompt)), reuse_limit(len(prompt)))
    if restorable is None:
        return point
    return max((p for p in restorable if p <= point), default=0)

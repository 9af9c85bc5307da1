"""RecurrentSnapshot: a copy of the recurrent layers' state at one position.

Recurrent state cannot be cut at an earlier position, so going back is possible only to where a copy was kept.
Knows nothing of tensors; made and consumed by sequence.py.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class RecurrentSnapshot:
    """State of the recurrent layers [first, last) after `n_valid` positions.

    `conv` f32 [n_channels, d_conv-1] and `state` f32 [n_head_v, d_state, d_state] by global layer number; both empty
    for a span without recurrent layers.
    """

    first: int
    last: int
    n_valid: int
    conv: dict[int, np.ndarray]
    state: dict[int, np.ndarray]

    @property
    def n_bytes(self) -> int:
        """Bytes the copy takes."""
        return sum(a.nbytes for a in (*self.conv.values(), *self.state.values()))

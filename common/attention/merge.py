"""The merge of normalised partial results (O, lse), the form that the base protocol carries.

    lse = log Σ exp(lse_i)        O = Σ exp(lse_i - lse) · O_i

Exact over disjoint sets of keys; the identity is (0, -inf). Our own messages carry accumulators instead (partial.py).
Knows nothing of who computed the parts. Used by the bridge's callers in common/engine.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.attention.partial import PartialAttention, fold_all


def from_normalised(o: np.ndarray, lse: np.ndarray) -> PartialAttention:
    """A normalised result as accumulators: m = lse and l = 1, so that o is its own unnormalised output.

    o [*rows, head_dim_v], lse [*rows], base e, -inf where a row saw no key (its o is then ignored).
    """
    seen = ~np.isneginf(lse)
    return PartialAttention(lse, seen.astype(o.dtype), np.where(seen[..., None], o, 0).astype(o.dtype))


def merge(parts: Sequence[tuple[np.ndarray, np.ndarray]]) -> tuple[np.ndarray, np.ndarray]:
    """Merges (O, lse) pairs from left to right; give them oldest keys first. Raises EngineError on an empty list."""
    return fold_all(from_normalised(o, lse) for o, lse in parts).normalised()

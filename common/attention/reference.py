"""Attention written as its formula, in float64: the oracle that kernels, pages and merges are held against.

Slow, and meant to be read. Used by tests, by common/engine/reference.py and by checks of device programs.
"""

from __future__ import annotations

import numpy as np

from common.attention.partial import PartialAttention


def attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, visible: np.ndarray | None = None
) -> PartialAttention:
    """Partial attention of grouped queries over some keys.

    q       [n_head_kv, rows, head_dim_k]      k [n_keys, n_head_kv, head_dim_k]      v [n_keys, n_head_kv, head_dim_v]
    visible bool [rows, n_keys] or None for all: which keys a row may see
    Returns float64 accumulators [n_head_kv, rows]; rows that see nothing are the identity.
    """
    q, k, v = (array.astype(np.float64) for array in (q, k, v))
    scores = scale * np.einsum("hrd,nhd->hrn", q, k)  # [n_head_kv, rows, n_keys]
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
    m = scores.max(axis=-1, initial=-np.inf)
    weights = np.exp(scores - np.where(np.isneginf(m), 0.0, m)[..., None])
    return PartialAttention(m, weights.sum(axis=-1), np.einsum("hrn,nhd->hrd", weights, v))


def softmax_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, visible: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """The same by the textbook, over all keys at once and row by row: (O, lse), for comparison with merged parts.

    Shares no line with `attend`, `fold` or `merge`, so that it can accuse them.
    """
    n_head_kv, n_rows, _ = q.shape
    o = np.zeros((n_head_kv, n_rows, v.shape[-1]))
    lse = np.full((n_head_kv, n_rows), -np.inf)
    for head in range(n_head_kv):
        for row in range(n_rows):
            keys = np.flatnonzero(visible[row]) if visible is not None else np.arange(len(k))
            if len(keys) == 0:
                continue
            scores = scale * (k[keys, head].astype(np.float64) @ q[head, row].astype(np.float64))
            lse[head, row] = np.logaddexp.reduce(scores)
            o[head, row] = np.exp(scores - lse[head, row]) @ v[keys, head].astype(np.float64)
    return o, lse

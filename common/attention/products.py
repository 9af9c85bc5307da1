"""Partial attention of many rows by NumPy: two matrix products of NumPy's BLAS in f32, exponentials between them.

Exact but for f32 rounding: nothing is rounded to f16 on the way. Which processors it is the faster form on is measured
in common/engine/forms.py. Used by common/engine/page_kernel.py.
"""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController

from common.attention.partial import PartialAttention


@functools.cache
def _controller() -> ThreadpoolController:
    return ThreadpoolController()


def blas_threads(n: int) -> AbstractContextManager[Any]:
    """Inside a `with`, NumPy's products run on n threads. The limit is the process's, and is lifted again."""
    return _controller().limit(limits=n, user_api="blas")


def attend_rows(
    q: np.ndarray, k: np.ndarray, v_lines: np.ndarray, scale: float, visible: np.ndarray | None = None
) -> PartialAttention:
    """Accumulators f32 [n_head_kv, n_rows] over all keys given.

    q       f32 [n_head_kv, n_rows, head_dim_k]        k f16 or f32 [n_head_kv, n_keys, head_dim_k]
    v_lines f16 or f32 [n_head_kv, head_dim_v, n_keys]: one line of keys for each element of a value
    visible bool [n_rows, n_keys] or None for all: which keys a row may see; rows that see none are the identity
    """
    n_head_kv, n_rows, _ = q.shape
    part = PartialAttention.identity((n_head_kv, n_rows), v_lines.shape[1])
    scores = np.empty((n_rows, k.shape[1]), np.float32)
    blind = np.zeros(n_rows, bool) if visible is None else ~visible.any(axis=1)
    hidden = None if visible is None else ~visible
    for head in range(n_head_kv):
        wide_k, wide_v = k[head].astype(np.float32), v_lines[head].astype(np.float32)
        np.matmul(q[head] * np.float32(scale), wide_k.T, out=scores)
        if hidden is not None:
            scores[hidden] = -np.inf
        m = np.where(blind, np.float32(0), scores.max(axis=1))
        scores -= m[:, None]
        np.exp(scores, out=scores)
        part.m[head] = np.where(blind, -np.inf, m)
        scores.sum(axis=1, out=part.l[head])
        np.matmul(scores, wide_v.T, out=part.o[head])
    return part

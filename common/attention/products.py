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

BLOCK_ROWS = 384
"""Rows whose scores are at hand at once: they should stay in a cache between the passes over them."""
LOWEST = np.finfo(np.float32).min


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
    scores = np.empty((min(n_rows, BLOCK_ROWS), k.shape[1]), np.float32)
    for head in range(n_head_kv):
        wide_k, wide_v = k[head].astype(np.float32), v_lines[head].astype(np.float32)
        for first in range(0, n_rows, BLOCK_ROWS):
            rows = slice(first, min(first + BLOCK_ROWS, n_rows))
            block = scores[: rows.stop - first]
            np.matmul(q[head, rows] * np.float32(scale), wide_k.T, out=block)
            if visible is not None:
                block[~visible[rows]] = -np.inf
            m = block.max(axis=1)
            part.m[head, rows] = m
            block -= np.maximum(m, LOWEST)[:, None]  # -inf stays -inf in rows that see nothing
            np.exp(block, out=block)
            block.sum(axis=1, out=part.l[head, rows])
            np.matmul(block, wide_v.T, out=part.o[head, rows])
    return part

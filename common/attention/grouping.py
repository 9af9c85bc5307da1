"""Grouped queries: several query heads read one key/value head, so their rows are one matrix beside it. Pure.

Used by common/engine, the reference and the worker.
"""

from __future__ import annotations

import numpy as np


def group_queries(q: np.ndarray, n_head_kv: int) -> np.ndarray:
    """[n_tokens, n_head, d] -> [n_head_kv, n_group * n_tokens, d]: all rows that read one key/value head together.

    Row g * n_tokens + t is token t of the group's member g; query head h belongs to key/value head h // n_group.
    """
    n_tokens, n_head, d = q.shape
    grouped = q.reshape(n_tokens, n_head_kv, n_head // n_head_kv, d)
    return grouped.transpose(1, 2, 0, 3).reshape(n_head_kv, -1, d)


def ungroup_rows(rows: np.ndarray, n_tokens: int) -> np.ndarray:
    """[n_head_kv, n_group * n_tokens, d] -> [n_tokens, n_head, d], the inverse of group_queries."""
    n_head_kv, _, d = rows.shape
    return rows.reshape(n_head_kv, -1, n_tokens, d).transpose(2, 0, 1, 3).reshape(n_tokens, -1, d)

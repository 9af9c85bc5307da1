"""The oracle's own parts: rows grouped by key/value head and back, and attention against a case worked by hand."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from common.attention.grouping import group_queries, ungroup_rows
from common.attention.reference import attend, softmax_attention


@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_grouped_rows_find_their_way_back(n_tokens: int, n_head_kv: int, n_group: int, d: int) -> None:
    q = np.arange(n_tokens * n_head_kv * n_group * d).reshape(n_tokens, n_head_kv * n_group, d)
    rows = group_queries(q, n_head_kv)
    assert np.array_equal(ungroup_rows(rows, n_tokens), q)
    for member in range(n_group):  # row g * n_tokens + t of head h is token t of query head h * n_group + g
        assert np.array_equal(rows[-1, member * n_tokens], q[0, (n_head_kv - 1) * n_group + member])


def test_two_keys_worked_by_hand() -> None:
    """Scores 0 and ln 3: weights 1/4 and 3/4, lse = ln 4; the second row sees the first key only, the third none."""
    q = np.array([[[1.0], [1.0], [1.0]]])
    k = np.array([[[0.0]], [[2 * math.log(3)]]])
    v = np.array([[[8.0]], [[4.0]]])
    visible = np.array([[True, True], [True, False], [False, False]])
    for o, lse in (attend(q, k, v, 0.5, visible).normalised(), softmax_attention(q, k, v, 0.5, visible)):
        assert np.allclose(o[0, :, 0], [5.0, 8.0, 0.0], atol=1e-15)
        assert np.allclose(lse[0], [math.log(4), 0.0, -np.inf], atol=1e-15)

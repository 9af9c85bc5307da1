"""Aim: a worker's way and its work are told apart, whatever mixture of groups and rows is asked.

Method: answers as a worker of known way and speed would give them.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.bridge.pace import Pace

ASKED = st.lists(st.tuples(st.integers(1, 60), st.sampled_from([6, 12, 1536])), min_size=1, max_size=30)


@given(ASKED, st.floats(0, 0.1), st.floats(1e-7, 1e-3))
def test_way_and_work_are_what_they_were(asked, wait_s, row_s):
    pace = Pace()
    for n_groups, n_rows in asked:
        work_s = row_s * n_groups * n_rows
        pace.took(wait_s + work_s, work_s, n_groups, n_rows)
    told = pace.told()
    assert told is not None and told.n_rows == asked[-1][1]
    assert (told.wait_s, told.row_s) == (pytest.approx(wait_s, abs=1e-9), pytest.approx(row_s))


def test_nothing_is_told_before_an_answer_and_a_worker_that_claims_more_than_passed_is_not_believed():
    pace = Pace()
    assert pace.told() is None
    pace.took(0.1, 5.0, 2, 5)
    told = pace.told()
    assert told is not None and (told.wait_s, told.row_s) == (0.0, pytest.approx(0.01))

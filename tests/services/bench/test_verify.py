"""Aim: verify counts token by token, and passes only when something was compared, nothing differed, the worker worked.
Method: the totals by hand; the processes themselves are run by the journey tests and by `outrigger verify`."""

from __future__ import annotations

import pytest

from services.bench.verify import Totals


def test_equal_answers_pass_only_with_a_worker():
    totals = Totals()
    assert not totals.passed
    totals.compare("a", (1, 2, 3), (1, 2, 3))
    assert not totals.passed, "the worker did nothing"
    totals.worker_tokens = 512
    assert totals.passed and (totals.compared, totals.equal) == (3, 3)


@pytest.mark.parametrize("found, n_equal", [((1, 9, 3), 2), ((1, 2), 2), ((1, 2, 3, 4), 3), ((), 0)])
def test_a_difference_in_token_or_length_fails(found, n_equal):
    totals = Totals(worker_tokens=1)
    assert totals.compare("prompt x", (1, 2, 3), found) == n_equal
    assert not totals.passed and totals.equal < totals.compared
    assert "prompt x" in totals.problems[0]

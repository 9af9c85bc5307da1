"""Aim: answers that must be equal are counted token by token; one that is missing is as wrong as another one.
Method: random answers, counted again in the plainest way."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from services.bench.compared import Compared, n_alike

ANSWERS = st.lists(st.integers(0, 3), max_size=12)


@given(ANSWERS, ANSWERS)
def test_every_place_counts_once(right, found):
    n_equal, n_total = n_alike(right, found)
    places = range(max(len(right), len(found)))
    assert n_total == len(places)
    assert n_equal == sum(right[i : i + 1] == found[i : i + 1] for i in places)


@given(st.lists(st.tuples(ANSWERS, ANSWERS), max_size=5))
def test_counts_add_up_and_each_difference_is_told(pairs):
    counts = Compared()
    for number, (right, found) in enumerate(pairs):
        counts.compare(str(number), right, found)
    assert counts.compared == sum(max(len(right), len(found)) for right, found in pairs)
    assert (counts.compared == counts.equal) == (counts.problems == []) == all(a == b for a, b in pairs)
    assert [int(text.partition(":")[0]) for text in counts.problems] == [
        number for number, (right, found) in enumerate(pairs) if right != found
    ]

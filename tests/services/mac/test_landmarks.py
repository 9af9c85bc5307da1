"""Aim: within its capacity the policy keeps what was asked for, then turn borders, then an even spread over the rest.
Method: hypothesis draws sequences, borders and capacities; the rules are checked one by one, by counting."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from common.limits import UBATCH_TOKENS
from services.mac.grid import grid_floor
from services.mac.landmarks import POINTS_MAX, points_worth_keeping, turn_borders

ends = st.integers(0, 3000).map(lambda k: k * UBATCH_TOKENS)
positions = st.lists(st.integers(0, 3000 * UBATCH_TOKENS), max_size=30)
capacities = st.integers(0, 400)


@given(ends, positions, positions, capacities)
def test_only_grid_points_of_the_sequence_and_not_too_many(end, needed, borders, capacity):
    points = points_worth_keeping(end, map(grid_floor, needed), borders, capacity)
    assert len(points) <= min(capacity, POINTS_MAX)
    assert all(0 < point <= end and point % UBATCH_TOKENS == 0 for point in points)


@given(ends, positions, positions, capacities)
def test_what_is_needed_comes_first_and_the_newest_of_it_when_not_all_fits(end, needed, borders, capacity):
    needed = {grid_floor(point) for point in needed if UBATCH_TOKENS <= point <= end}
    points = points_worth_keeping(end, needed, borders, capacity)
    assert set(sorted(needed)[max(0, len(needed) - capacity) :] if capacity else []) <= points


@given(ends, positions, st.integers(1, 400))
def test_half_of_the_room_is_for_the_newest_borders(end, borders, capacity):
    floors = sorted({grid_floor(border) for border in borders if border >= UBATCH_TOKENS} - {0})
    floors = [floor for floor in floors if floor <= end]
    points = points_worth_keeping(end, (), borders, capacity)
    n_sure = min(len(floors), (min(capacity, POINTS_MAX) + 1) // 2)
    assert set(floors[len(floors) - n_sure :]) <= points


@given(ends, capacities)
def test_without_borders_no_gap_is_more_than_twice_the_even_one(end, capacity):
    points = sorted(points_worth_keeping(end, (), (), capacity))
    if not points:
        assert end < UBATCH_TOKENS or capacity == 0
        return
    gaps = np.diff([0, *points, end])
    n_grid = end // UBATCH_TOKENS
    even = -(-n_grid // min(capacity, POINTS_MAX)) * UBATCH_TOKENS
    assert gaps.max() < 2 * even + UBATCH_TOKENS


@given(ends, positions, positions, capacities, st.integers(2, 400).map(lambda k: k * UBATCH_TOKENS))
def test_no_state_is_spread_between_two_ubatches_that_run_staggered(
    end, needed, borders, capacity, pairs_from
):
    needed, borders = ([grid_floor(point) for point in points] for points in (needed, borders))
    points = points_worth_keeping(end, needed, borders, capacity, pairs_from)
    between = {p for p in points if p > pairs_from and p % (2 * UBATCH_TOKENS)}
    assert between <= {*needed, *borders}
    below = points_worth_keeping(end, needed, borders, capacity) - points
    assert all(p > pairs_from and p % (2 * UBATCH_TOKENS) for p in below)


@given(ends, st.integers(1, 60))
def test_a_sequence_that_grew_wants_no_point_it_had_not_wanted_before(end, capacity):
    """Otherwise the states it wants would not be there: they can only be kept while reading past them."""
    before = points_worth_keeping(end, (), (), capacity)
    after = points_worth_keeping(2 * end, (), (), capacity)
    assert {point for point in after if point <= end} <= before


@given(st.lists(st.integers(0, 5), max_size=40), st.sets(st.integers(0, 5), max_size=2))
def test_borders_are_right_after_the_tokens_that_end_turns(ids, turn_end_ids):
    borders = turn_borders(np.array(ids, np.int32), turn_end_ids)
    assert borders == [at + 1 for at, token in enumerate(ids) if token in turn_end_ids]

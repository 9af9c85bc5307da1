"""Aim: what a row is depends on the token ids alone, so every cut, canonical point and reuse point obeys the grid.
Method: hypothesis draws lengths around the grid and compares warm reads with the cold read of the same tokens."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.limits import UBATCH_TOKENS
from services.mac.grid import canonical_end, common_prefix, cut_read, grid_floor, reuse_limit, reuse_point

GRID = UBATCH_TOKENS
near_grid = st.builds(lambda k, d: max(1, k * GRID + d), st.integers(0, 40), st.integers(-3, 3))
lengths = near_grid | st.integers(1, 40 * GRID)


@given(lengths)
def test_a_cold_read_covers_every_token_once_and_ends_in_two_rows_or_more(end):
    ubatches = cut_read(0, end)
    assert ubatches[0].position == 0 and ubatches[-1].end == end
    assert all(a.end == b.position for a, b in itertools.pairwise(ubatches))
    assert all(2 <= u.n_tokens <= GRID for u in ubatches) or end == 1
    assert all(u.position % GRID == 0 for u in ubatches[:-1])


@given(lengths, st.data())
def test_a_warm_read_is_cut_like_the_cold_read_of_the_same_tokens(end, data):
    start = data.draw(st.integers(0, reuse_limit(end) // GRID)) * GRID
    cold = cut_read(0, end)
    assert cut_read(start, end) == tuple(u for u in cold if u.position >= start)


@given(lengths)
def test_rows_before_the_canonical_end_came_from_full_ubatches_of_the_grid(end):
    point = canonical_end(end)
    before = [u for u in cut_read(0, end) if u.position < point]
    assert point % GRID == 0 and sum(u.n_tokens for u in before) == point
    assert all(u.n_tokens == GRID for u in before)


@given(lengths, lengths, lengths)
def test_what_a_new_prompt_reuses_is_what_its_cold_read_would_compute(n_held_read, n_prompt, n_common):
    n_common = min(n_common, n_held_read, n_prompt)
    held = np.arange(n_held_read, dtype=np.int32)
    prompt = np.arange(n_prompt, dtype=np.int32)
    prompt[n_common:] += 1_000_000
    point = reuse_point(held[: canonical_end(n_held_read)], prompt, None)
    assert point <= min(n_common, n_prompt - 1)
    cold_then = [u for u in cut_read(0, n_held_read) if u.end <= point]
    cold_now = [u for u in cut_read(0, n_prompt) if u.end <= point]
    assert cold_then == cold_now and sum(u.n_tokens for u in cold_now) == point


def test_a_hybrid_goes_back_only_to_a_snapshot():
    ids = np.arange(1000, dtype=np.int32)
    assert reuse_point(ids[:768], ids, None) == 768
    assert reuse_point(ids[:768], ids, {512}) == 512
    assert reuse_point(ids[:768], ids, {1024}) == 0
    assert reuse_point(ids[:768], ids, set()) == 0


def test_common_prefix_counts_equal_leading_ids():
    assert common_prefix(np.array([1, 2, 3], np.int32), np.array([1, 2, 4, 5], np.int32)) == 2
    assert common_prefix(np.array([], np.int32), np.array([1], np.int32)) == 0
    assert common_prefix(np.array([7, 8], np.int32), np.array([7, 8, 9], np.int32)) == 2


@pytest.mark.parametrize("start, end", [(5, 10), (256, 256), (512, 300)])
def test_a_read_that_is_none_is_refused(start, end):
    with pytest.raises(ValueError, match="starts at a grid point"):
        cut_read(start, end)


def test_the_row_given_up():
    assert [tuple(u) for u in cut_read(0, 513)] == [(0, 256), (256, 255), (511, 2)]
    assert canonical_end(513) == 256 and canonical_end(514) == 512 and grid_floor(513) == 512

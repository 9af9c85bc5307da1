"""Aim: kept states stay within their bytes, the pinned one survives all, short memory costs states and no request.
Method: hypothesis drives Snapshots with small arrays as states and a machine's memory that the test decides."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.state.recurrent import RecurrentSnapshot
from services.mac.snapshots import MEMORY_LEFT_BYTES, Snapshots, memory_free_bytes

EACH = 64
"""Bytes of a state in the tests, both parts together."""
PLENTY = MEMORY_LEFT_BYTES + EACH

points = st.integers(1, 30).map(lambda k: 256 * k)


def state(point, part):
    half = np.zeros(EACH // 8, np.float32)
    return RecurrentSnapshot(part, part + 1, point, {part: half[:0]}, {part: half})


def put(snapshots, point):
    for part in (0, 1):
        snapshots.put(point, part, lambda part=part: state(point, part))


@given(st.lists(points, max_size=40), st.frozensets(points), st.integers(1, 8), points)
def test_never_more_bytes_than_allowed_and_the_pinned_point_stays(order, wanted, capacity, pinned):
    snapshots = Snapshots(2, EACH, capacity * EACH + EACH // 2, lambda: PLENTY)
    snapshots.want(wanted, pinned)
    put(snapshots, pinned)
    for point in order:
        put(snapshots, point)
        assert snapshots.n_bytes <= capacity * EACH and pinned in snapshots.points
    kept_wanted = snapshots.points & wanted
    dropped_wanted = (set(order) & wanted) - snapshots.points
    assert not dropped_wanted or snapshots.points <= wanted | {pinned}, "what nobody wants goes first"
    assert not dropped_wanted or len(snapshots.points) == capacity
    assert all(snapshots.at(point)[1].n_valid == point for point in kept_wanted)


def test_a_point_counts_once_all_parts_are_there():
    snapshots = Snapshots(2, EACH, 4 * EACH, lambda: PLENTY)
    snapshots.put(256, 0, lambda: state(256, 0))
    assert snapshots.points == set()
    snapshots.put(256, 1, lambda: state(256, 1))
    assert snapshots.points == {256}


def test_when_the_machine_has_nothing_to_spare_states_go_and_none_is_added():
    free = [PLENTY]
    snapshots = Snapshots(2, EACH, 8 * EACH, lambda: free[0])
    snapshots.want(frozenset({512}), 256)
    for point in (256, 512, 768, 1024):
        put(snapshots, point)
    free[0] = PLENTY - 1
    put(snapshots, 1280)
    assert 1280 not in snapshots.points and 256 in snapshots.points and len(snapshots.points) < 4


def test_a_state_that_cannot_be_copied_is_not_kept():
    snapshots = Snapshots(2, EACH, 8 * EACH, lambda: PLENTY)
    put(snapshots, 256)

    def fails():
        raise MemoryError

    snapshots.put(512, 0, lambda: state(512, 0))
    snapshots.put(512, 1, fails)
    assert snapshots.points == set(), "half of the others went, and the one at hand is whole or not there"
    snapshots.want(frozenset(), 512)
    with pytest.raises(MemoryError):
        snapshots.put(512, 0, fails)


def test_shed_leaves_the_pinned_point():
    snapshots = Snapshots(2, EACH, 8 * EACH, lambda: PLENTY)
    snapshots.want(frozenset({256, 512, 768}), 512)
    for point in (256, 512, 768):
        put(snapshots, point)
    snapshots.shed()
    assert snapshots.points == {512}


def test_limit_and_clear():
    snapshots = Snapshots(2, EACH, 8 * EACH, lambda: PLENTY)
    for point in (256, 512, 768):
        put(snapshots, point)
    snapshots.limit(512)
    assert snapshots.points == {256, 512}
    snapshots.clear()
    assert snapshots.points == set() and snapshots.n_bytes == 0


def test_a_sequence_that_shares_keeps_within_its_own_bytes():
    ours, theirs = (Snapshots(2, EACH, n * EACH, lambda: PLENTY) for n in (2, 8))
    theirs.want(frozenset({256, 1024}), 512)
    for point in (256, 512, 768, 1024):
        put(theirs, point)
    ours.share(theirs)
    assert ours.points == {512, 1024} and theirs.points == {256, 512, 768, 1024}


def test_the_machine_says_what_it_can_spare():
    assert memory_free_bytes() > 0

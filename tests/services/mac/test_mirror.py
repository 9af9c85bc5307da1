"""Aim: whatever happened before, syncing leaves the mirror with exactly the rows of the sequence up to the start.
Method: hypothesis drives a Mirror against a model of the worker's memory that holds one tag per position."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.limits import UBATCH_TOKENS
from services.mac.mirror import PUSH_BYTES_MAX, Mirror, Push, Rewind, tokens_per_push

positions = st.integers(0, 8).map(lambda k: k * UBATCH_TOKENS)
events = st.lists(
    st.tuples(st.sampled_from(["new_sequence", "append", "distrust", "cancel"]), positions),
    min_size=1,
    max_size=12,
)


@given(events, st.booleans(), st.sampled_from([256, 1024, 4096]))
def test_after_a_sync_the_mirror_holds_the_sequence_up_to_the_start(happened, can_rewind, per_push):
    """`worker` is what the far end really holds: one tag a position, the tag being the sequence it belongs to."""
    worker: list[int] = [0] * 300  # rows of an earlier host
    mirror, sequence = Mirror(), 1
    for event, point in happened:
        if event == "new_sequence":
            sequence += 1
            mirror.limit(point)
            worker[:point] = [sequence if t == sequence - 1 else t for t in worker[:point]]
        elif event == "append" and not mirror.dirty:
            worker = worker[: mirror.n] + [sequence] * point
            mirror.moved(len(worker))
        elif event == "distrust":
            worker += [sequence] * point
            mirror.distrust()
        elif event == "cancel":  # a rewind is under way; the sequence changes before its answer is taken
            worker += [sequence] * point
            mirror.distrust()
            worker = worker[: mirror.n if can_rewind else 0]
            sequence += 1
            mirror.limit(point)
            worker[:point] = [sequence if t == sequence - 1 else t for t in worker[:point]]
            mirror.rewound(len(worker))
        start = point
        mirror.limit(start)
        while (sync := mirror.next_sync(start, per_push)) is not None:
            if isinstance(sync, Rewind):
                assert sync.n <= start
                reached = sync.n if can_rewind else 0
                worker = worker[:reached]
            else:
                assert isinstance(sync, Push)
                assert sync.p0 == len(worker) and sync.p0 < sync.p1 <= start and sync.p1 - sync.p0 <= per_push
                assert sync.with_state == (sync.p1 == start)
                worker += [sequence] * (sync.p1 - sync.p0)
            mirror.moved(len(worker))
        assert len(worker) == start == mirror.n and set(worker) <= {sequence}


@given(st.integers(1, 1 << 30))
def test_a_push_is_whole_ubatches_within_its_bound_if_that_is_possible(bytes_per_token):
    tokens = tokens_per_push(bytes_per_token)
    assert tokens % UBATCH_TOKENS == 0 and tokens > 0
    assert tokens * bytes_per_token <= PUSH_BYTES_MAX or tokens == UBATCH_TOKENS


def test_a_fresh_mirror_is_emptied_before_its_first_use():
    assert Mirror().next_sync(0, 256) == Rewind(0)

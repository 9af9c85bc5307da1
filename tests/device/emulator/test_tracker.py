"""Aim: every frame is seen to begin, to be half there and to end at its right byte, however the stream is cut; paces
add up. Method: hypothesis cuts streams of frames; arrival times are compared with the arithmetic of a wire.
"""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from common.wire.frames import HEADER, RESIDUAL
from device.emulator.pace import Pace
from device.emulator.tracker import FrameTracker


@given(st.lists(st.tuples(st.integers(1, 79), st.integers(0, 90)), max_size=8), st.data())
def test_events_stand_at_the_right_bytes(frames: list[tuple[int, int]], data: st.DataObject) -> None:
    stream, expected = b"", []
    for frame_type, n_payload in frames:
        stream += HEADER.pack((RESIDUAL.magic, frame_type, n_payload))
        half = n_payload - n_payload // 2
        expected += [("began", frame_type, len(stream)), ("half", frame_type, len(stream) + half)]
        stream += bytes(n_payload)
        expected.append(("ended", frame_type, len(stream)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=9)))
    tracker, seen = FrameTracker(), []
    for begin, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        for passing in tracker.feed(memoryview(stream)[begin:end]):
            assert 0 <= passing.first <= passing.at <= end - begin
            seen.append((passing.event, passing.type, begin + passing.at))
    assert seen == expected


@given(st.lists(st.tuples(st.floats(0, 0.01), st.integers(1, 10**6)), min_size=1, max_size=20))
def test_a_wire_is_never_faster_than_its_rate_nor_slower_than_it_must(
    bursts: list[tuple[float, int]],
) -> None:
    pace, now, free_at, last = Pace(1e8, 0.002, 0.0, random.Random(0)), 0.0, 0.0, 0.0
    for gap_s, n_bytes in bursts:
        now += gap_s
        free_at = max(free_at, now) + n_bytes / 1e8
        arrival = pace.arrival(now, n_bytes)
        assert arrival == free_at + 0.002
        assert arrival >= last
        last = arrival


def test_jitter_keeps_the_order_and_its_bound() -> None:
    pace = Pace(0.0, 0.001, 0.005, random.Random(7))
    arrivals = [pace.arrival(0.01 * i, 16) for i in range(200)]
    assert arrivals == sorted(arrivals)
    added = [arrival - 0.01 * i - 0.001 for i, arrival in enumerate(arrivals)]
    assert 0 <= min(added) < 0.001
    assert 0.004 < max(added) <= 0.005

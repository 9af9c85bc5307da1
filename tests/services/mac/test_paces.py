"""Aim: from the stages of reads come the stage times of any split layer at any position. Method: reads are made up from
known paces; what is learned from them must give those paces back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.wire.messages import ReadReport, UbatchTimes
from services.mac.paces import Line, Paces

N_LAYER = 32


def made_up(host_s, worker_s, layer, start=0, n=9, slope=0.0, last_tokens=256):
    """A split read (alone: worker_s None) on sides that take so long a layer, more by `slope` every 4,096 tokens."""
    stages = []
    for index in range(n):
        position, is_last = start + 256 * index, index == n - 1
        longer = 1 + slope * position / 4096
        if worker_s is None:
            stages.append(UbatchTimes(position, 256, 0.0, head_s=host_s * longer * N_LAYER))
            continue
        times = UbatchTimes(
            position,
            last_tokens if is_last else 256,
            0.0,
            head_s=host_s * longer * layer,
            worker_s=0.0 if is_last else worker_s * longer * (N_LAYER - layer),
            round_trip_s=0.0 if is_last else worker_s * longer * (N_LAYER - layer) + 0.75,
            queue_s=0.0 if is_last else 0.5,
            tail_s=host_s * longer * (N_LAYER - layer) if is_last else 0.0,
        )
        stages.append(times)
    return ReadReport(stages=tuple(stages))


pace = st.floats(1e-4, 1.0)


@given(pace, pace, st.integers(1, N_LAYER - 1), st.integers(1, N_LAYER - 1), st.integers(0, 64))
def test_times_of_any_layer_follow_from_one_read(host_s, worker_s, measured_at, asked_for, n_before):
    paces = Paces(N_LAYER)
    assert not paces.known
    paces.learn(made_up(host_s, worker_s, measured_at, start=256 * n_before), measured_at)
    times = paces.times(asked_for, 256 * n_before)
    assert times.head_s == pytest.approx(host_s * asked_for)
    assert times.tail_s == pytest.approx(host_s * (N_LAYER - asked_for))
    assert times.worker_s == pytest.approx(worker_s * (N_LAYER - asked_for))
    assert times.link_s == pytest.approx(0.25)


def test_both_kinds_of_reads_tell_of_the_host_and_only_split_ones_of_the_worker():
    paces = Paces(N_LAYER)
    paces.learn(made_up(0.01, None, 20), 20)
    assert not paces.known
    paces.learn(made_up(0.01, 0.02, 20), 20)
    assert paces.known and paces.times(16, 0).alone_s == pytest.approx(0.32)
    paces.forget_worker()
    assert not paces.known


def test_a_short_last_ubatch_is_not_compared_with_full_ones():
    paces = Paces(N_LAYER)
    paces.learn(made_up(0.01, 0.02, 20, last_tokens=7), 20)
    assert paces.times(16, 0).head_s == pytest.approx(0.16)


def test_depth_costs_time_and_the_newest_pace_counts():
    paces = Paces(N_LAYER)
    for start in (0, 4096, 8192):
        paces.learn(made_up(0.01, 0.01, 16, start=start, slope=0.5), 16)
    shallow, deep = paces.times(16, 1024).alone_s, paces.times(16, 16384).alone_s
    assert shallow < 1.6 * 0.32 and deep > 1.5 * shallow
    for _ in range(10):
        paces.learn(made_up(0.01, 0.03, 16), 16)
    assert paces.times(16, 1024).worker_s == pytest.approx(0.48, rel=0.1)


@given(
    st.lists(st.tuples(st.integers(0, 65536), st.floats(0.001, 10)), min_size=1, max_size=30),
    st.integers(0, 131072),
)
def test_no_observations_lead_to_a_pace_that_cannot_be(observations, position):
    line = Line()
    for at, value in observations:
        line.add(at, value)
    assert 0 < line.at(position) < float("inf")

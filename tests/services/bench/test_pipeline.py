"""Aim: the bound of a pipeline is what an ideal pipeline takes, so that an efficiency above 1 is impossible.
Method: known limits, and hypothesis against a simulation in small time steps."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.wire.messages import UbatchTimes
from services.bench.pipeline import equal_sides_limit, pipeline_bound_s

ticks = st.integers(1, 9)


@given(st.lists(st.tuples(ticks, ticks), min_size=1, max_size=8), ticks, ticks)
def test_the_bound_is_what_a_simulation_takes(remote, last_head, last_tail):
    stages = [UbatchTimes(0, 1, 0.0, head_s=head, worker_s=tail) for head, tail in remote]
    stages.append(UbatchTimes(0, 1, 0.0, head_s=last_head, tail_s=last_tail))
    heads, tails = [head for head, _ in remote] + [last_head], [tail for _, tail in remote]
    now = sent = done = 0
    while heads or tails:
        now += 1
        if sent > done and tails:  # the worker has a residual at the start of this tick
            tails[0] -= 1
            if not tails[0]:
                tails.pop(0)
                done += 1
        if heads:
            heads[0] -= 1
            if not heads[0]:
                heads.pop(0)
                sent += 1
    assert pipeline_bound_s(stages) == now + last_tail


@pytest.mark.parametrize(
    "n, share, limit", [(8, 40 / 64, 8 / 5.375), (8, 1 / 2, 16 / 9), (32, 1 / 2, 64 / 33), (1, 1 / 2, 1.0)]
)
def test_limits_of_equal_sides(n, share, limit):
    assert equal_sides_limit(n, share) == pytest.approx(limit)


def test_a_read_alone_is_bound_by_its_own_sum():
    assert pipeline_bound_s([UbatchTimes(0, 1, 0.0, head_s=2.0), UbatchTimes(1, 1, 2.0, head_s=3.0)]) == 5.0

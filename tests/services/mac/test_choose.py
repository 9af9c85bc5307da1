"""Aim: the planner's predicted seconds are what a pipeline of these stage times takes, and its choices are the best of
those predictions. Method: hypothesis against a discrete-event simulation that knows nothing of the formulas."""

from __future__ import annotations

import heapq
import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.mac.choose import (
    GAIN_MIN,
    LOSS_MAX,
    Outlook,
    StageTimes,
    abandoned_s,
    choose_layer,
    chunks_to_send,
    finish_s,
    predict,
    should_abandon,
    window_for,
)

seconds = st.integers(1, 40)
stage_times = st.builds(
    StageTimes,
    head_s=seconds,
    tail_s=seconds,
    worker_s=seconds,
    link_s=st.integers(0, 20).map(lambda n: 2 * n),
    import_s=st.just(0),
)
counts = st.integers(0, 6)


@st.composite
def outlooks(draw):
    now = Outlook(draw(stage_times), draw(counts), draw(counts), draw(counts), draw(seconds))
    return replace(now, n_redone=draw(counts)) if now.heads_left + now.n_ready else replace(now, n_ready=1)


def simulated_s(now: Outlook, n_more: int) -> int:
    """Event by event: the host takes its next piece of work, the worker the first chunk that has arrived."""
    times, one_way = now.times, now.times.link_s // 2
    order = itertools.count()
    events = []  # (at, order, what)
    for _ in range(min(n_more, now.n_ready)):
        heapq.heappush(events, (one_way, next(order), "arrived"))
    heads, to_send = now.heads_left, n_more - min(n_more, now.n_ready)
    tails = now.heads_left + now.n_ready - n_more
    awaited = now.n_in_flight + n_more
    waiting, computing, clock = now.n_in_flight, False, 0
    if heads:
        heapq.heappush(events, (times.head_s, next(order), "head"))
    if waiting:
        waiting, computing = waiting - 1, True
        heapq.heappush(events, (now.busy_s, next(order), "ran"))
    elif awaited:
        computing = True
        heapq.heappush(events, (now.busy_s, next(order), "free"))
    while events:
        clock, _, what = heapq.heappop(events)
        if what == "head":
            heads -= 1
            if to_send:
                to_send -= 1
                heapq.heappush(events, (clock + one_way, next(order), "arrived"))
            if heads:
                heapq.heappush(events, (clock + times.head_s, next(order), "head"))
        elif what == "arrived":
            waiting += 1
        elif what == "ran":
            computing = False
            heapq.heappush(events, (clock + one_way, next(order), "home"))
        elif what == "free":
            computing = False
        elif what == "home":
            awaited -= 1
        if waiting and not computing:
            waiting, computing = waiting - 1, True
            heapq.heappush(events, (clock + times.worker_s, next(order), "ran"))
    assert not (heads or to_send or awaited or waiting)
    return clock + tails * times.tail_s


@given(outlooks(), st.data())
def test_the_prediction_is_what_a_simulation_takes(now, data):
    n_more = data.draw(st.integers(0, now.n_more_max))
    assert finish_s(now, n_more) == simulated_s(now, n_more)


@given(outlooks())
def test_no_other_number_of_chunks_is_much_better(now):
    chosen = chunks_to_send(now)
    best = min(simulated_s(now, n_more) for n_more in range(now.n_more_max + 1))
    assert simulated_s(now, chosen) * (1 - GAIN_MIN) <= best
    assert chosen == now.n_more_max or simulated_s(now, chosen) == best


@given(stage_times, st.integers(1, 12))
def test_a_split_that_is_planned_never_predicts_a_loss_beyond_one_chunk(times, n):
    """Whatever the worker's pace: giving it nothing is among the choices."""
    choice = predict(5, n, times)
    assert choice.alone_s == n * times.alone_s
    assert choice.split_s * (1 - GAIN_MIN) <= choice.alone_s
    assert choice.gain == pytest.approx(1 - choice.split_s / choice.alone_s)


@given(stage_times, st.integers(2, 12), st.integers(1, 4), st.integers(1, 30))
def test_a_worker_that_never_answers_costs_a_bounded_share(times, n, window, patience):
    """The host has run all heads, `window` chunks are out and nothing ever comes: time passes until it gives up."""
    in_flight = min(window, n - 1)
    now = Outlook(times, 0, n - in_flight, in_flight, busy_s=times.worker_s, alone_s=n * times.alone_s)
    waited = 0.0
    step = LOSS_MAX * now.alone_s / patience
    while not should_abandon(replace(now, elapsed_s=n * times.head_s + waited)):
        waited += step
    assert waited <= LOSS_MAX * now.alone_s + step + 1e-9
    assert abandoned_s(now) + n * times.head_s == pytest.approx(n * times.alone_s)


def equal_sides(layer, n_layer=32, worker=1.0, link_s=0.0):
    return StageTimes(layer, n_layer - layer, worker * (n_layer - layer), link_s)


@pytest.mark.parametrize(
    "worker, n, expected", [(1.0, 8, range(15, 17)), (1.0, 32, range(15, 17)), (1.45, 32, range(18, 21))]
)
def test_the_best_layer_lies_where_both_sides_take_as_long(worker, n, expected):
    choice = choose_layer(range(1, 32), n, lambda layer: equal_sides(layer, worker=worker), current=31)
    assert choice.layer in expected
    assert choice.gain > 0.4 / worker


def test_a_layer_is_changed_only_for_a_real_gain():
    def times(layer):
        return equal_sides(layer, 128)

    assert choose_layer(range(1, 128), 32, times, current=65).layer == 65
    assert choose_layer(range(1, 128), 32, times, current=90).layer == 64
    assert choose_layer(range(80, 128), 32, times, current=10).layer == 80


@pytest.mark.parametrize("worker, busy_s, waits", [(0.2, 0.1, True), (0.2, 5.0, False), (1.0, 0.0, False)])
def test_before_the_first_chunk_only_a_gain_is_waited_for(worker, busy_s, waits):
    """All heads have run; the mirror is not in place yet. Tails take 0.4 s here, four of them may go there."""
    now = Outlook(
        StageTimes(0.6, 0.4, worker), heads_left=0, n_ready=5, n_in_flight=0, busy_s=busy_s, alone_s=100.0
    )
    assert should_abandon(now) is not waits


def test_a_slow_worker_or_cable_is_not_worth_it():
    assert predict(20, 8, equal_sides(20, worker=30.0)).gain < GAIN_MIN
    assert predict(20, 8, equal_sides(20, link_s=400.0)).gain < GAIN_MIN
    assert predict(20, 8, equal_sides(20)).gain > 0.3


def test_the_window_covers_the_way():
    assert window_for(StageTimes(1, 1, 1.0, link_s=0.1), 8) == 2
    assert window_for(StageTimes(1, 1, 1.0, link_s=3.5), 8) == 5
    assert window_for(StageTimes(1, 1, 0.1, link_s=30.0), 8) == 8

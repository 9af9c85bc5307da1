"""Aim: first come first served within a bound, and cancelling one request never touches another.
Method: the queue is used directly from the test's thread, with hypothesis for mixed orders of events."""

from __future__ import annotations

import threading

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import BusyError
from common.limits import REQUESTS_WAITING_MAX
from common.wire.messages import Generate, Sampling
from services.mac.requests import RequestQueue

TOKENS = np.arange(4, dtype=np.int32)


def ask(request_id="r", credit=8, deadline_s=60.0):
    return Generate(request_id, len(TOKENS), 16, Sampling(), (), deadline_s, credit)


def test_first_come_first_served_and_ahead_counts_everyone_before():
    queue = RequestQueue()
    assert [queue.submit(ask(name), TOKENS, b"p") for name in "abc"] == [0, 1, 2]
    first = queue.take()
    assert first.ask.request_id == "a"
    assert queue.counts() == (1, 2)
    assert queue.submit(ask("d"), TOKENS, b"p") == 3
    queue.done(first)
    assert [queue.take().ask.request_id for _ in range(3)] == ["b", "c", "d"]


def test_the_queue_is_bounded():
    queue = RequestQueue()
    for index in range(REQUESTS_WAITING_MAX):
        queue.submit(ask(str(index)), TOKENS, b"p")
    with pytest.raises(BusyError, match=str(REQUESTS_WAITING_MAX)):
        queue.submit(ask("one more"), TOKENS, b"p")


@given(st.integers(1, 6), st.data())
def test_a_cancel_hits_its_request_only(n_requests, data):
    queue = RequestQueue()
    for index in range(n_requests):
        queue.submit(ask(str(index)), TOKENS, b"p")
    running = queue.take()
    victim = data.draw(st.integers(0, n_requests - 1))
    gone = queue.cancel(b"p", str(victim))
    assert [r.ask.request_id for r in gone] == ([] if victim == 0 else [str(victim)])
    assert running.cancelled == (victim == 0)
    queue.done(running)
    left = [queue.take().ask.request_id for _ in range(queue.counts()[1])]
    assert left == [str(i) for i in range(1, n_requests) if i != victim]


def test_one_that_fits_is_taken_before_its_turn_and_the_others_are_told_their_place():
    queue = RequestQueue()
    for name in "abcd":
        queue.submit(ask(name), TOKENS, b"p")
    first = queue.take()
    assert queue.take(lambda request: request.ask.request_id == "c").ask.request_id == "c"
    assert queue.take(lambda _request: False) is None
    assert [(r.ask.request_id, ahead) for r, ahead in queue.moved()] == [("b", 2)]
    queue.done(first)
    assert [(r.ask.request_id, ahead) for r, ahead in queue.moved()] == [("b", 1), ("d", 2)]
    assert queue.moved() == []


def test_choices_are_cancelled_one_by_one_and_together_they_are_the_request():
    queue = RequestQueue()
    queue.submit(msgspec.structs.replace(ask("a"), n_choices=2), TOKENS, b"p")
    request = queue.take()
    queue.cancel(b"p", "a", 1)
    assert not request.cancelled and request.choices_cancelled == {1}
    queue.cancel(b"p", "a", 0)
    assert request.cancelled


def test_a_change_seen_before_sleeping_is_not_slept_over():
    queue = RequestQueue()
    seen = queue.changes
    queue.submit(ask("a"), TOKENS, b"p")
    queue.wait(3600, seen)
    assert queue.take() is not None


def test_another_peer_cannot_cancel_or_grant():
    queue = RequestQueue()
    queue.submit(ask("a"), TOKENS, b"p")
    request = queue.take()
    queue.cancel(b"q", "a")
    queue.grant(b"q", "a", 5)
    assert not request.cancelled and request.credit == 8
    queue.grant(b"p", "a", 5)
    assert request.credit == 13


def test_a_lost_peer_takes_all_its_requests_with_it():
    queue = RequestQueue()
    for name, peer in (("a", b"p"), ("b", b"q"), ("c", b"p")):
        queue.submit(ask(name), TOKENS, peer)
    running = queue.take()
    assert [r.ask.request_id for r in queue.cancel(b"p")] == ["c"]
    assert running.cancelled and queue.counts() == (1, 1)


def test_waiting_requests_expire_and_the_running_one_does_not_here():
    now_s = [0.0]
    queue = RequestQueue(clock=lambda: now_s[0])
    for name, deadline_s in (("a", 1), ("b", 1), ("c", 99)):
        queue.submit(ask(name, deadline_s=deadline_s), TOKENS, b"p")
    queue.take()
    now_s[0] = 2.0
    assert [r.ask.request_id for r in queue.expire()] == ["b"]
    assert queue.counts() == (1, 1)


def test_a_grant_wakes_a_waiting_thread_and_close_ends_all_turns():
    queue = RequestQueue()
    queue.submit(ask("a"), TOKENS, b"p")
    request = queue.take()
    woken = threading.Event()

    def sleeper():
        while not request.cancelled:
            queue.wait(60)
        woken.set()

    thread = threading.Thread(target=sleeper, daemon=True)
    thread.start()
    queue.close()
    while not woken.wait(0.05):
        queue.close()  # the sleeper may not have been asleep yet
    thread.join()
    assert request.cancelled and queue.take() is None

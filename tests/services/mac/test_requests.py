"""Aim: first come first served within a bound, and cancelling one request never touches another.
Method: the queue is used directly from the test's thread, with hypothesis for mixed orders of events."""

from __future__ import annotations

import threading

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
    assert queue.take(0).ask.request_id == "a"
    assert queue.counts() == (1, 2)
    assert queue.submit(ask("d"), TOKENS, b"p") == 3
    queue.done()
    assert [queue.take(0).ask.request_id for _ in range(3)] == ["b", "c", "d"]


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
    running = queue.take(0)
    victim = data.draw(st.integers(0, n_requests - 1))
    gone = queue.cancel(b"p", str(victim))
    assert [r.ask.request_id for r in gone] == ([] if victim == 0 else [str(victim)])
    assert running.cancelled == (victim == 0)
    queue.done()
    left = [queue.take(0).ask.request_id for _ in range(queue.counts()[1])]
    assert left == [str(i) for i in range(1, n_requests) if i != victim]


def test_another_peer_cannot_cancel_or_grant():
    queue = RequestQueue()
    queue.submit(ask("a"), TOKENS, b"p")
    request = queue.take(0)
    queue.cancel(b"q", "a")
    queue.grant(b"q", "a", 5)
    assert not request.cancelled and request.credit == 8
    queue.grant(b"p", "a", 5)
    assert request.credit == 13


def test_a_lost_peer_takes_all_its_requests_with_it():
    queue = RequestQueue()
    for name, peer in (("a", b"p"), ("b", b"q"), ("c", b"p")):
        queue.submit(ask(name), TOKENS, peer)
    running = queue.take(0)
    assert [r.ask.request_id for r in queue.cancel(b"p")] == ["c"]
    assert running.cancelled and queue.counts() == (1, 1)


def test_waiting_requests_expire_and_the_running_one_does_not_here():
    now_s = [0.0]
    queue = RequestQueue(clock=lambda: now_s[0])
    for name, deadline_s in (("a", 1), ("b", 1), ("c", 99)):
        queue.submit(ask(name, deadline_s=deadline_s), TOKENS, b"p")
    queue.take(0)
    now_s[0] = 2.0
    assert [r.ask.request_id for r in queue.expire()] == ["b"]
    assert queue.counts() == (1, 1)


def test_a_grant_wakes_a_waiting_thread_and_close_ends_all_turns():
    queue = RequestQueue()
    queue.submit(ask("a"), TOKENS, b"p")
    request = queue.take(0)
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
    assert request.cancelled and queue.take(60) is None

"""Waits between attempts: within their bounds, growing, and beginning anew after a success."""

from __future__ import annotations

from services.bridge.retry import FIRST_S, JITTER_S, LONGEST_S, Backoff


def test_waits_grow_within_bounds_and_begin_anew():
    backoff = Backoff()
    waits = [backoff.next_s() for _ in range(12)]
    assert FIRST_S <= waits[0] <= FIRST_S + JITTER_S
    assert all(FIRST_S <= wait <= LONGEST_S + JITTER_S for wait in waits)
    assert waits[-1] >= LONGEST_S
    backoff.reset()
    assert backoff.next_s() <= FIRST_S + JITTER_S


def test_two_bridges_do_not_march_in_step():
    def some():
        backoff = Backoff()
        return [backoff.next_s() for _ in range(5)]

    assert some() != some()

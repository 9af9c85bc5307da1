"""Aim: who is well, silent or stuck, and when that ends a process, is decided by stated rules; delays double.

Method: the rules are pure; members and times in, verdicts out.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.wire.messages import Beat, StateChanged
from services.launch.roster import Member, Roster
from services.launch.vigil import FIRST_WORD_S, RETRY_S_MAX, judge, retry_wait_s

LIMITS = {"silence_s": 20.0, "stall_s": 100.0}


def serving(work: int = 3) -> Member:
    """A process that said at 10 s that it serves, and beat at the same time."""
    roster = Roster(["mac"])
    roster.take(StateChanged("mac", 7, "starting"), b"", 9.0)
    roster.take(StateChanged("mac", 7, "serving"), b"", 10.0)
    roster.take(Beat("mac", 7, work), b"", 10.0)
    return roster.members["mac"]


@pytest.mark.parametrize(
    ("silent_s", "state", "ends"),
    [(1, "serving", False), (4.9, "serving", False), (5.1, "silent", False), (20.1, "silent", True)],
)
def test_silence_is_told_early_and_ended_late(silent_s, state, ends):
    verdict = judge(serving(), 10 + silent_s, **LIMITS)
    assert (verdict.state, bool(verdict.reason_to_end)) == (state, ends)
    assert ("no sign of life" in verdict.detail) == (state == "silent")


@pytest.mark.parametrize(
    ("step_s", "state", "told", "ends"),
    [
        (4, "serving", False, False),
        (6, "serving", True, False),
        (31, "stuck", True, False),
        (101, "stuck", True, True),
    ],
)
def test_a_long_step_is_told_then_stuck_then_ended(step_s, state, told, ends):
    member = serving()
    member.heard_at = 10.0 + step_s  # it beats, but the working thread takes no turn
    verdict = judge(member, 10 + step_s, **LIMITS)
    assert (verdict.state, bool(verdict.detail), bool(verdict.reason_to_end)) == (state, told, ends)


def test_a_process_without_a_working_thread_is_never_stuck():
    member = serving(work=0)
    member.heard_at = 10_000.0
    assert judge(member, 10_000.0, **LIMITS).state == "serving"


def test_the_first_word_may_take_longer():
    member = Member("mac")
    member.begin_life(7, 0.0)
    assert judge(member, FIRST_WORD_S - 1, **LIMITS).state == "starting"
    assert judge(member, FIRST_WORD_S + 1, **LIMITS).reason_to_end


@given(st.floats(0, 1e6), st.floats(0, 1e6))
def test_our_own_absence_is_nobodys_silence(absent_s, now):
    roster = Roster(["mac"])
    roster.take(StateChanged("mac", 7, "starting"), b"", now)
    roster.take(Beat("mac", 7, 1), b"", now)
    roster.forgive(absent_s)
    assert not judge(roster.members["mac"], now + absent_s, **LIMITS).reason_to_end


def test_one_that_does_not_run_says_when_it_is_tried_again():
    member = Member("mac", state="backoff", retry_at=12.0)
    assert judge(member, 10.0, **LIMITS).detail == "tried again in 2 s"


def test_delays_double_up_to_a_minute():
    assert [retry_wait_s(n) for n in range(1, 9)] == [1, 2, 4, 8, 16, 32, RETRY_S_MAX, RETRY_S_MAX]

"""Whether a process is well, and what is done about one that is not: pure rules, read from top to bottom.

A process is *silent* when its beats stay away: its loop is stuck, or somebody stopped it (SIGSTOP). It is *stuck* when
it beats but its working thread takes no turn: an engine that hangs. Both are told soon and ended late, because one
step of a large model takes long. One that ended is started again: at once after a life of EARLY_S, else after delays
that double. Called by watch.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.launch.roster import Member

TOLD_S = 5.0
"""Silence, or one step, of so long is told in `status`."""
STUCK_TOLD_S = 30.0
"""One step of so long counts as stuck; unless stall_s is short, when half of it does."""
FIRST_WORD_S = 60.0
"""A process that was just started may take so long to its first word: imports on a busy machine."""
EARLY_S = 10
"""A process that ends sooner is restarted with growing delays; one that lived longer, at once."""
RETRY_S_MAX = 60.0
NEEDED = ("gateway", "mac")
"""Without these nothing is served; without the others the host reads alone."""


@dataclass(frozen=True)
class Verdict:
    """How a process is, in the words of `status`."""

    state: str
    detail: str = ""
    reason_to_end: str = ""
    """Why it is to be ended now; empty: let it be."""


def judge(member: Member, now: float, *, silence_s: float, stall_s: float) -> Verdict:
    """How a member is at `now`."""
    if not member.pid:
        left_s = None if member.retry_at is None else max(0.0, member.retry_at - now)
        return Verdict(member.state, "" if left_s is None else f"tried again in {left_s:.0f} s")
    heard_at = member.born_at if member.heard_at is None else member.heard_at
    silent_s, limit_s = now - heard_at, silence_s
    if member.heard_at is None:
        limit_s = max(silence_s, FIRST_WORD_S)
        if silent_s <= limit_s:
            return Verdict(member.state, member.detail)
    if silent_s > min(TOLD_S, limit_s / 2):
        detail = f"no sign of life for {silent_s:.0f} s"
        return Verdict("silent", detail, detail if silent_s > limit_s else "")
    step_s = now - member.worked_at
    if member.work and step_s > min(TOLD_S, stall_s / 2):
        detail = f"in one step for {step_s:.0f} s"
        state = "stuck" if step_s > min(STUCK_TOLD_S, stall_s / 2) else member.state
        why = f"its working thread took no turn for {step_s:.0f} s"
        return Verdict(state, detail, why if step_s > stall_s else "")
    return Verdict(member.state, member.detail)


def retry_wait_s(failures: int) -> float:
    """Delay before the next try after so many early ends in a row."""
    return min(RETRY_S_MAX, 2.0 ** max(0, failures - 1))

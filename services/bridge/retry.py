"""When to try again: exponential backoff with jitter by tenacity, as plain arithmetic without its loops.

Used by services.bridge.pump, which has a loop of its own.
"""

from __future__ import annotations

import tenacity

FIRST_S, LONGEST_S, JITTER_S = 0.2, 5.0, 0.3
REFUSED_S = 15.0
"""A worker with the wrong model is asked again at this pace: somebody may have put it right."""


class Backoff:
    """`next_s` grows with each call from FIRST_S to LONGEST_S, plus up to JITTER_S; `reset` begins anew."""

    def __init__(self) -> None:
        self._attempts = 0
        growing = tenacity.wait_exponential(multiplier=FIRST_S, max=LONGEST_S)
        self._wait = growing + tenacity.wait_random(0, JITTER_S)

    def reset(self) -> None:
        self._attempts = 0

    def next_s(self) -> float:
        """Seconds to wait before the next attempt."""
        self._attempts += 1
        state = tenacity.RetryCallState(tenacity.Retrying(), None, (), {})
        state.attempt_number = self._attempts
        return self._wait(state)

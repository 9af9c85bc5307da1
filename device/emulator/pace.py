"""When bytes would have arrived over the emulated link: a clock of its own for each direction. Pure arithmetic.

Bytes queue for the wire at its rate and then travel for the delay; bytes that were under way together share it. Time
is passed in, so that oversleeping once makes the next wait shorter and never the link slower.
"""

from __future__ import annotations

import random


class Pace:
    """One direction of a link. `rng` spreads the jitter."""

    def __init__(self, bytes_per_s: float, delay_s: float, jitter_s: float, rng: random.Random) -> None:
        self.bytes_per_s, self.delay_s, self.jitter_s = bytes_per_s, delay_s, jitter_s
        self._rng = rng
        self._wire_free_at = 0.0
        self._last_arrival = 0.0

    def arrival(self, sent_at: float, n_bytes: int, *, burst: bool = True) -> float:
        """When the last of n_bytes given to the wire at sent_at is there. burst: they start a message (jitter)."""
        wire_s = n_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
        self._wire_free_at = max(self._wire_free_at, sent_at) + wire_s
        jitter_s = self._rng.uniform(0, self.jitter_s) if burst and self.jitter_s else 0.0
        self._last_arrival = max(self._last_arrival, self._wire_free_at + self.delay_s + jitter_s)
        return self._last_arrival

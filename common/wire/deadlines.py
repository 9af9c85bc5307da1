"""How long an answer may take: pure arithmetic from what the last chunks cost. Used by `link`; holds no clock.

Nothing here is a timeout of its own: the allowance is many times what was measured, so that only a worker that
stopped, not one that is busy, is given up.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class AckClock:
    """Allowance for answers, in seconds.

    first_s: a chunk before any was measured. floor_s: no allowance is shorter. factor: of the predicted time.
    bytes_per_s: the slowest cable reckoned with (a tenth of USB 2).
    """

    first_s: float = 60.0
    floor_s: float = 3.0
    factor: float = 8.0
    bytes_per_s: float = 4e6
    token_ms: float | None = None
    """Slowest of the last acks, in ms a token."""

    def allowance_s(self, n_tokens: int, n_tokens_ahead: int, n_bytes: int) -> float:
        """Seconds until the answer is late, behind n_tokens_ahead; n_tokens is 0 for requests that compute nothing.

        Such a request waits for what is computed ahead of it, and copies its rows while they travel.
        """
        travel_s = n_bytes / self.bytes_per_s
        if self.token_ms is None:
            return (self.first_s if n_tokens else max(self.floor_s, self.first_s / 4)) + travel_s
        predicted_s = self.token_ms * (n_tokens + n_tokens_ahead) / 1000
        return max(self.floor_s, self.factor * predicted_s) + travel_s

    def learn(self, n_tokens: int, compute_ms: float) -> None:
        """Take in one ack. The pace may rise at once and falls by a tenth an ack: reads grow slower with depth."""
        pace = compute_ms / max(n_tokens, 1)
        self.token_ms = pace if self.token_ms is None else max(pace, 0.9 * self.token_ms)

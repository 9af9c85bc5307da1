"""Whether a token can be computed now, from what the host last said of itself. Pure: the clock is handed in.

Called by host.py (which feeds it) and server.py (/health, and 503 before work that could not be done).
"""

from __future__ import annotations

from dataclasses import dataclass

from common.wire.messages import HostStatus

STATUS_EVERY_S = 1.0
"""How often the gateway asks the host for its status."""
SILENCE_S_MAX = 5.0
"""Silence of the host's loop after which it counts as gone."""


@dataclass(slots=True)
class HostView:
    """The host as the gateway sees it."""

    beat_s_max: float
    """Longest time the host's compute thread may take without a turn: one ubatch of the largest model fits in."""
    status: HostStatus | None = None
    heard_at: float = 0.0
    beat_at: float = 0.0

    def heard(self, status: HostStatus, now: float) -> None:
        """The host told its status."""
        if self.status is None or status.beat != self.status.beat:
            self.beat_at = now
        self.status, self.heard_at = status, now

    def lost(self) -> None:
        """The host's life ended, or the connection to it."""
        self.status = None

    def why_not(self, now: float) -> str | None:
        """None when a token can be computed; otherwise the reason."""
        status = self.status
        if status is None:
            return "the host process does not answer"
        if now - self.heard_at > SILENCE_S_MAX:
            return f"the host process has been silent for {now - self.heard_at:.0f} s"
        if status.state == "starting":
            return "the host process is still loading the model"
        if status.state == "draining":
            return "the host process is stopping"
        if now - self.beat_at > self.beat_s_max:
            return f"the host's compute thread has not taken a turn for {now - self.beat_at:.0f} s"
        return None

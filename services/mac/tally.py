"""What the mac process counts for Prometheus: tokens and seconds by side, bypasses, fallbacks, first and next tokens.

The series themselves are declared in common.metrics; this file only says when they grow. Every value is told by the
compute thread.
"""

from __future__ import annotations

from common.wire.messages import ReadReport


class Tally:
    """The counters of one process."""

    def read_done(self, report: ReadReport) -> None:
        """A prompt is through all layers."""

    def fell_back(self, cause: str) -> None:
        """A worker failed; its part of a read is redone on the host."""

    def token_sent(self, *, is_first: bool, gap_s: float) -> None:
        """A token left; gap_s: since the one before it, or since the request arrived."""

    def finished(self, outcome: str) -> None:
        """A request is over: stop, length, cancelled or error."""

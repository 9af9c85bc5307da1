"""What the worker's mirror holds of the sequence at hand, and which message brings it to where a read starts.

The mirror is the worker's copy of K/V rows and recurrent state of the tail layers. Only rows it lacks are pushed. Pure
bookkeeping: the messages are sent by services.mac.remote_span, the rows come from the host's own tail layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from common.limits import MIB, UBATCH_TOKENS

PUSH_BYTES_MAX = 16 * MIB
"""Rows pushed in one message: small enough to stay within one deadline on a slow link."""


@dataclass(frozen=True)
class Rewind:
    """Tell the mirror to go back to `n` or to the nearest point before it that it can reach."""

    n: int


@dataclass(frozen=True)
class Push:
    """Send the host's rows [p0, p1); with_state: and the recurrent state at p1, which makes p1 the new end."""

    p0: int
    p1: int
    with_state: bool


class Mirror:
    """Rows [0, n) of the mirror belong to the sequence at hand; `dirty`: it may hold others after them."""

    def __init__(self) -> None:
        self.n = 0
        self.dirty = True

    def limit(self, point: int) -> None:
        """The sequence changed after `point`: what the mirror holds past it is of another one."""
        if self.n > point:
            self.n = point
            self.dirty = True

    def moved(self, n: int) -> None:
        """The worker says that it holds exactly [0, n)."""
        self.n = n
        self.dirty = False

    def rewound(self, n: int) -> None:
        """The worker says that it went back to n. The sequence may have been limited further since it was asked."""
        self.dirty = n > self.n
        self.n = min(n, self.n)

    def distrust(self) -> None:
        """Chunks may be running whose answers nobody will take: only what was acknowledged counts."""
        self.dirty = True

    def next_sync(self, start: int, tokens_per_push: int) -> Rewind | Push | None:
        """The next message that brings the mirror to `start`; None when it is there."""
        if self.dirty or self.n > start:
            return Rewind(min(self.n, start))
        if self.n == start:
            return None
        end = min(start, self.n + tokens_per_push)
        return Push(self.n, end, with_state=end == start)


def tokens_per_push(bytes_per_token: int) -> int:
    """How many tokens' rows of all tail layers go into one push: whole ubatches, at least one."""
    return max(1, PUSH_BYTES_MAX // max(1, bytes_per_token) // UBATCH_TOKENS) * UBATCH_TOKENS

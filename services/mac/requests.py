"""Requests between the loop's thread, which takes them in, and the compute thread, which serves one after the other.

First come, first served, bounded; cancelling a waiting request never touches the running one. Each field of a Request
has one writing thread; the condition only wakes a thread that waits. Knows nothing of sockets or engines.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from common.errors import BusyError
from common.limits import REQUESTS_WAITING_MAX
from common.wire.messages import Generate


@dataclass(eq=False)
class Request:
    """One Generate and how far it is. `peer` is whom to answer."""

    ask: Generate
    tokens: NDArray[np.int32]
    """The prompt, i32 [n_prompt]."""
    peer: bytes
    arrived_s: float
    granted: int
    """Tokens the client has taken or promised to take; written by the loop's thread."""
    cancelled: bool = False
    """Written by the loop's thread."""
    generated: list[int] = field(default_factory=list)
    """Token ids sent; written by the compute thread."""
    stopped: bool = False
    """A stop token was chosen; written by the compute thread."""

    @property
    def deadline_s(self) -> float:
        return self.arrived_s + self.ask.deadline_s

    @property
    def credit(self) -> int:
        """Tokens that may be sent before the client has to grant more."""
        return self.granted - len(self.generated)


class RequestQueue:
    """The waiting requests and the one that runs."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.closed = False
        self._waiting: deque[Request] = deque()
        self._running: Request | None = None
        self._changed = threading.Condition()

    # --- the loop's side

    def submit(self, ask: Generate, tokens: NDArray[np.int32], peer: bytes) -> int:
        """Take a request in; returns how many come before it. Raises BusyError when too many wait."""
        with self._changed:
            if len(self._waiting) >= REQUESTS_WAITING_MAX:
                raise BusyError(f"{len(self._waiting)} requests wait already; try again later")
            ahead = len(self._waiting) + (self._running is not None)
            self._waiting.append(Request(ask, tokens, peer, self.clock(), ask.credit))
            self._changed.notify_all()
            return ahead

    def grant(self, peer: bytes, request_id: str, credit: int) -> None:
        """The client takes `credit` more tokens. A request that is gone already is no error."""
        with self._changed:
            for request in self._matching(peer, request_id):
                request.granted += credit
            self._changed.notify_all()

    def cancel(self, peer: bytes, request_id: str | None = None) -> list[Request]:
        """Cancel one request of `peer`, or all of them; returns those that had not started and are gone now."""
        with self._changed:
            gone = [r for r in self._matching(peer, request_id) if r is not self._running]
            for request in gone:
                self._waiting.remove(request)
            if self._running in self._matching(peer, request_id):
                assert self._running is not None
                self._running.cancelled = True
            self._changed.notify_all()
            return gone

    def expire(self) -> list[Request]:
        """Take out the waiting requests whose deadline has passed."""
        now_s = self.clock()
        with self._changed:
            gone = [request for request in self._waiting if request.deadline_s <= now_s]
            for request in gone:
                self._waiting.remove(request)
            return gone

    def counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        with self._changed:
            return int(self._running is not None), len(self._waiting)

    def close(self) -> None:
        """No more turns: take() returns None from now on, and a running request counts as cancelled."""
        with self._changed:
            self.closed = True
            if self._running is not None:
                self._running.cancelled = True
            self._changed.notify_all()

    # --- the compute thread's side

    def take(self, timeout_s: float) -> Request | None:
        """The next request, which runs from now on; None when none came within timeout_s or the queue is closed."""
        with self._changed:
            if not self._waiting and not self.closed:
                self._changed.wait(timeout_s)
            if self.closed or not self._waiting:
                return None
            self._running = self._waiting.popleft()
            return self._running

    def wait(self, timeout_s: float) -> None:
        """Sleep until a grant, a cancel or a new request, at most timeout_s."""
        with self._changed:
            self._changed.wait(timeout_s)

    def done(self) -> None:
        """The running request is over."""
        with self._changed:
            self._running = None

    def _matching(self, peer: bytes, request_id: str | None) -> list[Request]:
        everyone = [*self._waiting, *([self._running] if self._running else [])]
        return [
            request
            for request in everyone
            if request.peer == peer and request_id in (None, request.ask.request_id)
        ]

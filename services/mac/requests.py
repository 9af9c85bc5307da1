"""Requests between the loop's thread, which takes them in, and the compute thread, which serves them.

First come, first served, bounded; a short request may be taken before a long one that waits (services.mac.schedule says
when). Cancelling a waiting request never touches a running one. Each field of a Request has one writing thread; the
condition only wakes a thread that waits. Knows nothing of sockets or engines.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

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
    ahead_told: int
    """Requests the client was told come first; written by the loop's thread."""
    cancelled: bool = False
    """Written by the loop's thread."""
    choices_cancelled: frozenset[int] = frozenset()
    """Choices the client does not want any more; replaced whole by the loop's thread."""
    told_end: bool = False
    """Its last event is on the way to the client: for everybody else it is over."""
    n_sent: int = 0
    """Tokens sent, of all choices; written by the compute thread."""

    @property
    def deadline_s(self) -> float:
        return self.arrived_s + self.ask.deadline_s

    @property
    def credit(self) -> int:
        """Tokens that may be sent before the client has to grant more."""
        return self.granted - self.n_sent

    def cancel(self, choice: int | None) -> None:
        """Nobody wants this choice (None: this request) any more."""
        if choice is not None:
            self.choices_cancelled |= {choice}
        self.cancelled |= choice is None or len(self.choices_cancelled) >= self.ask.n_choices


class RequestQueue:
    """The waiting requests and those that run."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.closed = False
        self.changes = 0
        """Grows with everything that may give the compute thread something to do."""
        self._waiting: list[Request] = []
        self._running: list[Request] = []
        self._changed = threading.Condition()

    # --- the loop's side

    def submit(self, ask: Generate, tokens: NDArray[np.int32], peer: bytes) -> int:
        """Take a request in; returns how many come before it. Raises BusyError when too many wait."""
        with self._changed:
            if len(self._waiting) >= REQUESTS_WAITING_MAX:
                raise BusyError(f"{len(self._waiting)} requests wait already; try again later")
            ahead = len(self._waiting) + len(self._running)
            self._waiting.append(Request(ask, tokens, peer, self.clock(), ask.credit, ahead))
            self._notify()
            return ahead

    def grant(self, peer: bytes, request_id: str, credit: int) -> None:
        """The client takes `credit` more tokens. A request that is gone already is no error."""
        with self._changed:
            for request in self._matching(peer, request_id):
                request.granted += credit
            self._notify()

    def cancel(self, peer: bytes, request_id: str | None = None, choice: int | None = None) -> list[Request]:
        """Cancel one request of `peer` (or one choice of it), or all of them.

        Returns those that had not started and are gone now.
        """
        with self._changed:
            for request in self._matching(peer, request_id):
                request.cancel(choice)
            gone = [request for request in self._waiting if request.cancelled]
            self._waiting = [request for request in self._waiting if not request.cancelled]
            self._notify()
            return gone

    def expire(self) -> list[Request]:
        """Take out the waiting requests whose deadline has passed."""
        now_s = self.clock()
        with self._changed:
            gone = [request for request in self._waiting if request.deadline_s <= now_s]
            self._waiting = [request for request in self._waiting if request.deadline_s > now_s]
            return gone

    def moved(self) -> list[tuple[Request, int]]:
        """(request, how many come first now) of those that wait and were told another place."""
        with self._changed:
            places = [(request, len(self._running) + index) for index, request in enumerate(self._waiting)]
            moved = [(request, ahead) for request, ahead in places if ahead != request.ahead_told]
            for request, ahead in moved:
                request.ahead_told = ahead
            return moved

    def counts(self) -> tuple[int, int]:
        """(running, waiting)."""
        with self._changed:
            return sum(not request.told_end for request in self._running), len(self._waiting)

    def running_of(self, peer: bytes) -> list[Request]:
        """Requests of `peer` that run and have not told their end."""
        with self._changed:
            return [request for request in self._running if request.peer == peer and not request.told_end]

    def close(self) -> None:
        """No more turns: take() returns None from now on, and running requests count as cancelled."""
        with self._changed:
            self.closed = True
            for request in self._running:
                request.cancelled = True
            self._notify()

    # --- the compute thread's side

    def take(self, fits: Callable[[Request], bool] = lambda _request: True) -> Request | None:
        """The first waiting request that fits, which runs from now on; None when there is none, or after close()."""
        with self._changed:
            request = next((r for r in self._waiting if fits(r)), None) if not self.closed else None
            if request is not None:
                self._waiting.remove(request)
                self._running.append(request)
            return request

    def wait(self, timeout_s: float, seen: int | None = None) -> None:
        """Sleep until a grant, a cancel or a new request, at most timeout_s; not at all if `changes` left `seen`."""
        with self._changed:
            if seen is None or seen == self.changes:
                self._changed.wait(timeout_s)

    def done(self, request: Request) -> None:
        """A running request is over."""
        with self._changed:
            self._running.remove(request)

    def _notify(self) -> None:
        self.changes += 1
        self._changed.notify_all()

    def _matching(self, peer: bytes, request_id: str | None) -> list[Request]:
        return [
            request
            for request in (*self._waiting, *self._running)
            if request.peer == peer and request_id in (None, request.ask.request_id)
        ]

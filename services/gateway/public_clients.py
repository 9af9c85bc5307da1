"""One ZeroMQ client: what waits for it, how long it has been silent, and the rules for one that does not read.

Pure but for the `send` it is handed. Replies go out in order; after them the requests take turns, so that no stream
of a client starves another of its own. A client for which too many replies wait is cut: everything for it is dropped,
and `Lost` is the first thing it hears once it reads again. Called by public_door.py.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

from common.limits import PUBLIC_REPLIES_MAX
from common.wire import public as p
from services.gateway.outflow import Outflow
from services.runtime.bus import PeerStuckError

Send = Callable[[list[bytes]], None]
"""Raises PeerStuckError when the client does not read, PeerGoneError when it is gone."""


class Client:
    """A client with its requests. `tasks` are the door's: one for each request that runs."""

    def __init__(self, send: Send, now: float) -> None:
        self.heard_at = now
        self.flows: dict[str, Outflow] = {}
        self.tasks: dict[str, Any] = {}
        self.stuck = False
        """The last message could not be sent: it is to be tried again."""
        self.n_cut = 0
        """Messages dropped since the client stopped reading; it is not told yet."""
        self._send = send
        self._replies: deque[p.AnyAnswer] = deque()

    @property
    def idle(self) -> bool:
        """Nothing runs and nothing waits."""
        return not (self.flows or self.tasks or self._replies or self.n_cut)

    def reply(self, message: p.AnyAnswer) -> bool:
        """Queue a reply that belongs to no stream; False when that was one too many and the client was cut."""
        self._replies.append(message)
        if len(self._replies) <= PUBLIC_REPLIES_MAX:
            return True
        self.n_cut += self.drop_all()
        return False

    def drop_all(self) -> int:
        """Drop everything that waits; returns how many messages and streams that were."""
        n_dropped = len(self._replies) + len(self.flows)
        self._replies.clear()
        self.flows.clear()
        return n_dropped

    def flush(self, now: float) -> None:
        """Send what can be sent now. Raises PeerGoneError."""
        try:
            if self.n_cut:
                self._send(p.encode(p.Lost(n_messages=self.n_cut)))
                self.n_cut = 0
            while self._replies:
                self._send(p.encode(self._replies[0]))
                self._replies.popleft()
            while self._one_of_each(now):
                pass
            self.stuck = False
        except PeerStuckError:
            self.stuck = True

    def _one_of_each(self, now: float) -> bool:
        """Send one message of every request that has one; whether any had."""
        any_left = False
        for flow in list(self.flows.values()):
            if (message := flow.peek()) is None:
                continue
            self._send(p.encode(message))
            flow.sent(now)
            any_left = True
            if flow.over:
                self.flows.pop(flow.id, None)
        return any_left

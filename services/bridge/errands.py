"""Requests of the mac process on their way: waiting for room on the cable, and answered exactly once.

Knows the bus and the cable's window; whether there is a link, and which, is services.bridge.pump's business, whose
thread alone calls this.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

from common.errors import LinkDownError, LocalProtocolError, OutriggerError
from common.limits import CHUNK_WINDOW_MAX
from common.log import get_log
from common.wire import messages as m
from services.bridge import translate
from services.bridge.cable import Cable
from services.runtime.bus import BlockingOwner
from services.runtime.conversation import Received

log = get_log()

WAITING_MAX = 2 * CHUNK_WINDOW_MAX
"""Requests that wait until the link may carry them; one more is refused."""


class Errands:
    """`mac_gone` is called when an answer cannot be delivered any more."""

    def __init__(self, owner: BlockingOwner, mac_gone: Callable[[], None]) -> None:
        self._owner = owner
        self._mac_gone = mac_gone
        self._waiting: deque[Received] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def full(self) -> bool:
        return len(self._waiting) >= WAITING_MAX

    def add(self, received: Received) -> None:
        """Keep a request until the cable has room for it."""
        self._waiting.append(received)

    def send(self, cable: Cable) -> None:
        """Put on the cable what the link's window has room for, in order. Raises LinkError."""
        while self._waiting:
            received = self._waiting[0]
            frame = translate.to_frame(received.message, received.frames)
            if not cable.link.room(type(frame)):
                return
            self._waiting.popleft()
            try:
                cable.send(frame, time.monotonic(), tag=received)
            except LocalProtocolError as error:  # a request that cannot be said; the link is unharmed
                self.refuse(received, error)

    def answer(
        self, received: Received, answer: m.BridgeToMacData, arrays: tuple[memoryview, ...] = ()
    ) -> None:
        """Give the answer to a request to whoever asked."""
        try:
            self._owner.send(answer, *arrays, to=received.peer)
        except LinkDownError as error:
            log.warning("mac is gone", error=str(error))
            self._mac_gone()

    def refuse(self, received: Received, error: OutriggerError) -> None:
        """Say that a request will not be answered by the worker, and why."""
        self.answer(received, translate.failed(received.message, error))

    def fail_all(self, in_flight: Iterable[Received], error: OutriggerError) -> None:
        """Refuse everything: what was on the cable, then what waited for it."""
        unanswered = [*in_flight, *self._waiting]
        self._waiting.clear()
        for received in unanswered:
            self.refuse(received, error)

"""What the host has to say to its askers, in order, within bounds; and what becomes of those who do not listen.

Sending never waits, so little lies here. A peer whose pipe is full, or who makes this box run over, loses its requests:
nothing more of them is sent, and once the peer speaks again each is told as failed. So no answer ever lacks a piece in
silence. Knows no sockets (`send` is given) and no queue of requests. Used by services.mac.desk on the loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from common.errors import OutriggerError, ServiceError
from common.limits import BUS_HWM_MESSAGES
from common.wire import messages as m

OUTBOX_MESSAGES_MAX = 4 * BUS_HWM_MESSAGES
OWED_PEERS_MAX = 16
"""Peers that may still be told of what they lost; of those that never speak again, the oldest are forgotten."""
NOT_READ = (
    "the host's messages were not read in time, so the rest of this answer was not computed; send it again"
)

Send = Callable[[m.Message, bytes], Coroutine[Any, Any, None]]
Lose = Callable[[bytes, str], Iterable[str]]


class Outbox:
    """Make it inside the running loop; `run` beside everything else."""

    def __init__(self, send: Send, lose: Lose) -> None:
        """send(message, peer) raises OutriggerError at once when it cannot.

        lose(peer, why) ends the peer's requests and names them: those that run will still send their last word here.
        """
        self._send, self._lose = send, lose
        self._queue: asyncio.Queue[tuple[bytes, m.Message]] = asyncio.Queue(OUTBOX_MESSAGES_MAX)
        self._cut: set[tuple[bytes, str]] = set()
        """(peer, request) of which something was lost: nothing more of it is sent."""
        self._owed: dict[bytes, list[m.Failed]] = {}

    def put(self, peer: bytes, message: m.Message) -> None:
        """Send `message` after everything put before it."""
        if self._queue.full():
            self._run_over()
        self._queue.put_nowait((peer, message))

    def heard(self, peer: bytes) -> None:
        """The peer speaks, so it may listen again: tell it of the requests it lost."""
        for failed in self._owed.pop(peer, ()):
            self.put(peer, failed)

    async def run(self) -> None:
        """Send, for ever."""
        while True:
            peer, message = await self._queue.get()
            try:
                await self._deliver(peer, message)
            finally:
                self._queue.task_done()

    async def flush(self) -> None:
        """Return once everything put so far has been sent."""
        await self._queue.join()

    async def _deliver(self, peer: bytes, message: m.Message) -> None:
        request_id: str = getattr(message, "request_id", "")
        if (peer, request_id) in self._cut:
            self._withhold(peer, request_id, message)
            return
        try:
            await self._send(message, peer)
        except OutriggerError as error:
            self._give_up(peer, str(error))
            self._withhold(peer, request_id, message)

    def _give_up(self, peer: bytes, why: str) -> None:
        self._cut |= {(peer, request_id) for request_id in self._lose(peer, why)}

    def _withhold(self, peer: bytes, request_id: str, message: m.Message) -> None:
        """A message that the peer does not get. Of a request's last one it will hear as a failure."""
        if not request_id:
            return
        if not isinstance(message, m.Finished | m.Failed):
            self._cut.add((peer, request_id))
            return
        self._cut.discard((peer, request_id))
        while len(self._owed) >= OWED_PEERS_MAX and peer not in self._owed:
            del self._owed[next(iter(self._owed))]
        self._owed.setdefault(peer, []).append(m.Failed(request_id, ServiceError.code, NOT_READ))

    def _run_over(self) -> None:
        """No room: the peer for whom most lies here loses it."""
        waiting = []
        while not self._queue.empty():
            waiting.append(self._queue.get_nowait())
            self._queue.task_done()
        ((loser, n),) = Counter(peer for peer, _ in waiting).most_common(1)
        for peer, message in waiting:
            if peer == loser:
                self._withhold(peer, getattr(message, "request_id", ""), message)
            else:
                self._queue.put_nowait((peer, message))
        self._give_up(loser, f"{n} messages wait for it")

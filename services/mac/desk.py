"""The loop's end of route "generate": takes requests in, sends their events out, tells how the host is.

It never computes and never waits for the compute thread; whoever asks gets an answer at once, also in the middle of a
long ubatch. A peer that cannot be reached any more loses its requests. Used by services.mac.host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Literal

import numpy as np

from common.errors import LinkDeadlineError, OutriggerError
from common.log import get_log
from common.wire import messages as m
from common.wire.routes import GENERATE
from services.mac.outbox import Outbox
from services.mac.requests import Request, RequestQueue
from services.runtime.bus import EventSink, Owner
from services.runtime.conversation import Received

TICK_S = 0.25

log = get_log()


class Desk:
    """Front of the request queue. Make it inside the running loop."""

    def __init__(
        self,
        endpoint: str,
        queue: RequestQueue,
        status: Callable[[], m.HostStatus],
        on_event: Callable[[m.Message], None] = lambda _message: None,
        *,
        on_bus_event: EventSink | None = None,
    ) -> None:
        """status: how the host is right now. on_event sees every event of every request, in order."""
        self._queue, self._status, self._on_event = queue, status, on_event
        self._loop = asyncio.get_running_loop()
        self._listeners: set[bytes] = set()
        self._told: tuple[object, ...] = ()
        self._owner = Owner(GENERATE, endpoint, on_event=on_bus_event)
        self._outbox = Outbox(lambda message, peer: self._owner.send(message, to=peer), self._lose)

    async def run(self) -> None:
        """Serve for ever."""
        tasks = [asyncio.create_task(part()) for part in (self._take_in, self._outbox.run, self._tick)]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await self._owner.close()

    def emit(self, request: Request, message: m.Message) -> None:
        """Send an event of `request` to whom it concerns; may be called from any thread, keeps the order."""
        if isinstance(message, m.Finished | m.Failed):
            request.told_end = True
        self._loop.call_soon_threadsafe(self._put, request.peer, message)

    async def flush(self) -> None:
        """Return once everything emitted so far has been sent."""
        await asyncio.sleep(0)
        await self._outbox.flush()

    def tell_status(self) -> None:
        """Send the status to everybody who ever spoke to us, if something in it changed."""
        status = self._status()
        worker = (status.worker.state, status.worker.device)
        now = (status.state, status.requests_running, status.requests_waiting, worker, status.n_ctx)
        if now != self._told:
            self._told = now
            for peer in self._listeners:
                self._outbox.put(peer, status)

    def _put(self, peer: bytes, message: m.Message) -> None:
        if isinstance(message, m.Finished | m.Failed):
            self.tell_status()  # first: who hears of the end must not find the request running after it
        self._outbox.put(peer, message)
        self._on_event(message)

    async def _take_in(self) -> None:
        async for received in self._owner:
            self._listeners.add(received.peer)
            self._outbox.heard(received.peer)
            match received.message:
                case m.Generate():
                    self._submit(received)
                case m.GrantTokens(request_id=request_id, credit=credit):
                    self._queue.grant(received.peer, request_id, credit)
                case m.Cancel(request_id=request_id, choice=choice):
                    self._cancel(received.peer, request_id, choice)
                case m.AskStatus():
                    self._outbox.put(received.peer, self._status())

    def _submit(self, received: Received) -> None:
        ask: m.Generate = received.message
        tokens = np.frombuffer(received.frames[0], np.int32).copy()
        try:
            ahead = self._queue.submit(ask, tokens, received.peer)
        except OutriggerError as error:
            log.info("request refused", request_id=ask.request_id, error=str(error))
            self._put(received.peer, m.Failed(ask.request_id, error.code, str(error)))
        else:
            self._put(received.peer, m.Queued(ask.request_id, ahead))

    def _cancel(self, peer: bytes, request_id: str, choice: int | None) -> None:
        """Requests that run end by themselves within one ubatch; those that wait end here."""
        for request in self._queue.cancel(peer, request_id, choice):
            self._put(peer, _never_started(request))

    def _lose(self, peer: bytes, why: str) -> list[str]:
        """A peer that is gone, or does not read: none of its requests is worth computing. Names them."""
        self._listeners.discard(peer)
        running = self._queue.running_of(peer)
        dropped = self._queue.cancel(peer)
        for request in dropped:
            self._put(peer, _never_started(request))
        log.info("peer lost", error=why, requests_dropped=len(dropped), requests_cancelled=len(running))
        return [request.ask.request_id for request in (*running, *dropped)]

    async def _tick(self) -> None:
        while True:
            for request in self._queue.expire():
                late = f"the request's deadline of {request.ask.deadline_s:g} s passed while it waited"
                self._put(request.peer, m.Failed(request.ask.request_id, LinkDeadlineError.code, late))
            for request, ahead in self._queue.moved():
                self._put(request.peer, m.Queued(request.ask.request_id, ahead))
            self.tell_status()
            await asyncio.sleep(TICK_S)


def _never_started(request: Request) -> m.Finished:
    n_prompt = len(request.tokens)
    return m.Finished(request.ask.request_id, "cancelled", n_prompt, 0, m.ReadReport())


def phase_of(message: m.Message) -> m.ShowPhase | None:
    """What the worker's screen should say after an event of a request; None when nothing changes."""
    phase: Literal["reading", "writing", "ready"]
    match message:
        case m.PrefillAdvanced(tokens_done=n1, tokens_total=n2):
            return m.ShowPhase("reading", n1, n2)
        case m.TokenReady(index=0):
            phase = "writing"
        case m.Finished() | m.Failed():
            phase = "ready"
        case _:
            return None
    return m.ShowPhase(phase)

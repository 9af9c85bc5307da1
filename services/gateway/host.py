"""The way to the host: carries out on the bus what streams.py and health.py decided.

One Asker on route "generate", and two coroutines for the process to run: `listen` and `tick`. Knows no HTTP and no
text. Called by server.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

from common.errors import BusyError, OutriggerError, ServiceError
from common.limits import TOKEN_CREDIT
from common.log import get_log
from common.wire import messages as m
from common.wire.routes import GENERATE
from services.gateway.health import STATUS_EVERY_S, HostView
from services.gateway.prompt import Job
from services.gateway.streams import Broken, Piece, RequestTable, Stream
from services.runtime.bus import Asker, BusEvent

_log = get_log()


class Answer:
    """One running request, seen by the task that answers the client; leaving `async with` cancels what still runs."""

    def __init__(self, host: HostChannel, request_id: str, job: Job, expires_at: float) -> None:
        self._host = host
        self._ready = asyncio.Event()
        self.stream: Stream = host.table.open(
            request_id,
            n_prompt=len(job.ids),
            stops=job.stops,
            expires_at=expires_at,
            wake=self._ready.set,
            n_choices=job.n_choices,
        )

    async def wait(self, timeout_s: float) -> None:
        """Returns when there is something to take, at the latest after `timeout_s`."""
        if not self.stream.pieces:
            self._ready.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await self._ready.wait()

    def require_accepted(self) -> None:
        """Raises the error of a request that the host refused at once (its queue is full, it drains)."""
        if self.stream.pieces and isinstance(refused := self.stream.pieces[0], Broken):
            raise refused.error

    async def take(self, timeout_s: float) -> list[Piece]:
        """What is there, waiting for it up to `timeout_s`; empty after that. Taking gives the host new credit."""
        await self.wait(timeout_s)
        pieces, replies = self._host.table.take(self.stream)
        await self._host.tell(replies)
        return pieces

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._host.tell(self._host.table.close(self.stream))


class HostChannel:
    """The gateway's end of route "generate". Made inside a running loop; use as `async with`."""

    def __init__(
        self,
        endpoint: str,
        table: RequestTable,
        *,
        beat_s_max: float,
        waiting_max: int,
        on_event: Callable[[BusEvent], None] = lambda _event: None,
        on_status: Callable[[m.HostStatus | None], None] = lambda _status: None,
    ) -> None:
        """`endpoint`: where the host listens; `waiting_max`: requests that may wait behind the running one.

        `on_status` hears every status of the host, and None when it was lost.
        """
        self.table = table
        self.view = HostView(beat_s_max)
        self._waiting_max = waiting_max
        self._on_event = on_event
        self._on_status = on_status
        self._asker = Asker(GENERATE, endpoint, on_event=self._noticed)

    async def __aenter__(self) -> HostChannel:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.table.break_all("the gateway stops")
        await self._asker.close()

    def why_not(self) -> str | None:
        """None when the host can compute a token now; otherwise the reason."""
        return self.view.why_not(time.monotonic())

    def require_ready(self) -> m.HostStatus:
        """The host's status. Raises ServiceError with the reason when it cannot compute a token now."""
        reason = self.why_not()
        status = self.view.status
        if reason is not None or status is None:
            raise ServiceError(f"no answer can be computed now: {reason}; try again in a moment")
        return status

    async def ask(self, request_id: str, job: Job, deadline_s: float) -> Answer:
        """Hands a job to the host. Raises BusyError when too many wait, ServiceError when it cannot be reached."""
        if len(self.table) > self._waiting_max:
            raise BusyError(f"{len(self.table)} requests run or wait already; try again later")
        answer = Answer(self, request_id, job, time.monotonic() + deadline_s)
        generate = m.Generate(
            request_id=request_id,
            n_tokens=len(job.ids),
            max_tokens=job.max_tokens,
            sampling=job.sampling,
            stop_token_ids=self.table.end_ids,
            deadline_s=deadline_s,
            credit=TOKEN_CREDIT,
            n_choices=job.n_choices,
            top_logprobs=job.top_logprobs,
        )
        try:
            await self._asker.send(generate, job.ids)
        except BaseException:
            self.table.close(answer.stream)
            raise
        return answer

    async def tell(self, messages: Iterable[m.Message]) -> None:
        """Sends what the table decided. A host that is gone need not be told: its loss ends the streams by itself."""
        for message in messages:
            try:
                await self._asker.send(message, wait_s=0)
            except OutriggerError as error:
                _log.warning(
                    "message to the host was not sent", kind=type(message).__name__, reason=str(error)
                )

    async def listen(self) -> None:
        """Takes in what the host says, for ever. Somebody must run this."""
        async for received in self._asker:
            message: Any = received.message
            if isinstance(message, m.HostStatus):
                self.view.heard(message, time.monotonic())
                self._on_status(message)
            else:
                await self.tell(self.table.apply(message))

    async def tick(self) -> None:
        """Asks for the host's status and looks at deadlines, for ever. Somebody must run this."""
        while True:
            if self._asker.connected:
                await self.tell([m.AskStatus()])
                await asyncio.sleep(STATUS_EVERY_S)
            else:  # ask as soon as there is somebody to ask
                with suppress(OutriggerError):
                    await self._asker.wait_connected(STATUS_EVERY_S)
            await self.tell(self.table.expire(time.monotonic()))

    def _noticed(self, event: BusEvent) -> None:
        if event.kind in ("restarted", "lost_peer"):
            self.view.lost()
            self._on_status(None)
            self.table.break_all("the host process was lost while it worked on this request; send it again")
        elif event.kind == "gap":
            self.table.break_all("messages of the host were lost on the way; send the request again")
        self._on_event(event)

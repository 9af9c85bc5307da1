"""The loop's end of route "link": has the bridge attach the worker, and follows what it tells of the link.

After a bridge is lost or restarted, and after a failure that left the link standing (an answer too late, a row that
cannot be), the worker is attached anew, so that the next read begins in a fresh life of the link. Knows no residuals.
Used by services.mac.host.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from common.errors import LinkDownError, LinkError
from common.log import get_log
from common.wire import messages as m
from common.wire.routes import LINK
from services.mac.worker import LinkState, LinkView, Worker
from services.runtime.bus import Asker, EventSink
from services.runtime.conversation import BusEvent

RETRY_S = 1.0

log = get_log()


class Tether:
    """Keeps `worker.link` true. Make it inside the running loop."""

    def __init__(
        self,
        endpoint: str,
        worker: Worker,
        hello: m.LinkHello,
        on_change: Callable[[], None],
        *,
        on_bus_event: EventSink | None = None,
    ) -> None:
        """hello: our half of the handshake. on_change is called whenever the link changed."""
        self._worker, self._hello, self._on_change = worker, hello, on_change
        self._on_bus_event = on_bus_event
        self._attach = asyncio.Event()
        self._attach.set()
        self._loop = asyncio.get_running_loop()
        self._asker = Asker(LINK, endpoint, name="mac", on_event=self._noticed)

    async def run(self) -> None:
        """Attach whenever it is needed, for ever."""
        follower = asyncio.create_task(self._follow(), name="link follower")
        try:
            while True:
                await self._attach.wait()
                self._attach.clear()
                try:
                    await self._asker.send(m.AttachWorker(self._hello))
                    self._now(LinkView("connecting"))
                except LinkDownError as error:
                    self._now(LinkView("absent", detail=str(error)))
                    await asyncio.sleep(RETRY_S)
                    self._attach.set()
        finally:
            follower.cancel()
            await self._asker.close()

    def reopen(self, hello: m.LinkHello) -> None:
        """Greet the worker anew, with another half of the handshake; may be called from any thread."""
        self._hello = hello
        self._loop.call_soon_threadsafe(self._attach.set)

    def failed(self, error: LinkError) -> None:
        """A read failed at the far end; may be called from any thread."""
        if not isinstance(error, LinkDownError):
            self._loop.call_soon_threadsafe(self._attach.set)

    async def show(self, phase: m.ShowPhase) -> None:
        """Tell the worker's screen what the host does; nothing happens when there is no bridge."""
        if self._asker.connected:
            try:
                await self._asker.send(phase, wait_s=0)
            except LinkDownError as error:
                log.debug("phase not shown", error=str(error))

    async def _follow(self) -> None:
        async for received in self._asker:
            match received.message:
                case m.LinkUp() as up:
                    self._now(self._ready(up))
                case m.LinkDown() as down:
                    state: LinkState = "refused" if down.final else "absent"
                    self._now(LinkView(state, down.link_epoch, detail=f"{down.cause}: {down.detail}"))
                case m.WorkerReported() as reported:
                    log.debug("worker reported", state=reported.state, avail_mb=reported.avail_mb)

    def _ready(self, up: m.LinkUp) -> LinkView:
        hello = up.hello
        return LinkView(
            "ready",
            up.link_epoch,
            min(hello.window, self._hello.window),
            hello.split_layer,
            device=hello.device,
            n_ctx=hello.n_ctx,
            token_ms=up.token_ms,
            rtt_us=up.rtt_us,
        )

    def _now(self, link: LinkView) -> None:
        before, self._worker.link = self._worker.link, link
        if (link.state, link.detail) != (before.state, before.detail):
            log.info("link changed", state=link.state, epoch=link.epoch, detail=link.detail)
        self._on_change()

    def _noticed(self, event: BusEvent) -> None:
        """The bridge went away or began a new life: whatever link there was is not ours any more."""
        if self._on_bus_event:
            self._on_bus_event(event)
        if event.kind in ("lost_peer", "restarted"):
            self._now(LinkView("absent", detail=f"the bridge {event.detail or 'was restarted'}"))
            self._attach.set()

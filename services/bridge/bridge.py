"""The bridge's event loop: route "link" (attach, detach, phase), the worker's control channel, and the pump beside it.

Everything here waits and nothing here is hot; residuals pass through services.bridge.pump on a thread of its own,
queries and pages through page_pump on another. Wires the parts together; called by services.bridge.__main__ and by
tests.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from common.config import BridgeSettings
from common.errors import LinkDownError, OutriggerError, ServiceError
from common.limits import MIB
from common.log import get_log
from common.metrics import Metrics
from common.wire import messages as m
from common.wire.deadlines import AckClock
from common.wire.routes import ATTENTION, LINK, PAGES, RESIDUAL, Route
from services.bridge.control import UNKNOWN, ControlClient
from services.bridge.frozen_metrics import FrozenMetrics
from services.bridge.page_pump import PagePump
from services.bridge.page_search import PageSearch
from services.bridge.pump import Pump
from services.bridge.search import Search, fixed_places
from services.runtime.bus import BlockingOwner, EventSink, Owner

log = get_log()

REPORT_EVERY_S = 2.0
PUMP_STOP_S = 1.0
WATCH_AGAIN_S = 0.5
SUSPENDING = "suspending"
THERMAL_SERIOUS = 2
TOLD_MAX = 64
"""Events of the link that wait to be told; each takes a moment, and one of them is what counts."""


class Bridge:
    """One worker's link. Make it inside the running loop; spawn `parts`, `close` at the end."""

    def __init__(
        self,
        settings: BridgeSettings,
        metrics: Metrics,
        endpoint: Callable[[Route], str],
        on_bus_event: EventSink | None = None,
        say: Callable[[str], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`say` takes a sentence for people whenever the link is in trouble, and when that is over."""
        self._metrics = metrics
        self._loop = asyncio.get_running_loop()
        self._closing = False
        self._pump_ended = asyncio.Event()
        self._mac: bytes | None = None
        self._up = False
        self._say, self._said = say, ""
        self._frozen = FrozenMetrics(metrics)
        self._reported: m.WorkerReported | None = None
        self._told: asyncio.Queue[m.LinkUp | m.LinkDown | None] = asyncio.Queue(TOLD_MAX)
        self._phases: asyncio.Queue[m.ShowPhase] = asyncio.Queue(1)
        self._control = ControlClient()
        self._owner = Owner(LINK, endpoint(LINK), on_event=on_bus_event)
        self.pump = Pump(
            BlockingOwner(RESIDUAL, endpoint(RESIDUAL), on_event=on_bus_event),
            fixed_places(settings),
            metrics,
            boot_id=secrets.randbits(63),
            tell=lambda event: self._from_pump(self._note, event),
            gone=lambda: self._from_pump(self._note, None),
            ended=lambda: self._from_pump(self._pump_ended.set),
            make_clock=lambda: AckClock(first_s=settings.answer_s_first, floor_s=settings.answer_s_min),
        )
        self.page_pump = PagePump(
            BlockingOwner(ATTENTION, endpoint(ATTENTION), on_event=on_bus_event),
            BlockingOwner(PAGES, endpoint(PAGES), on_event=on_bus_event),
            metrics,
            boot_id=secrets.randbits(63),
            ended=lambda: self._from_pump(self._pump_ended.set),
            make_clock=lambda: AckClock(first_s=settings.answer_s_first, floor_s=settings.answer_s_min),
        )
        self._search = Search(
            settings, self.pump.offer, wanted=lambda: self._mac is not None and not self._up
        )
        self._page_search = PageSearch(self.page_pump, lambda: self.pump.place, self._search.reach)

    def parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs beside each other on the loop, by name. The pump starts with them."""
        self.pump.start()
        self.page_pump.start()
        return {
            "listener": self._listen(),
            "teller": self._tell(),
            "reporter": self._report(),
            "watcher": self._watch(),
            "phases": self._show(),
            "pump watch": self._watch_pump(),
            "page search": self._page_search.run(),
        } | ({"search": self._search.run()} if self._search.needed else {})

    async def close(self) -> None:
        """Answer what is under way with LinkFailed, close the link and the bus."""
        self._closing = True
        await asyncio.to_thread(self.pump.stop, PUMP_STOP_S)
        await asyncio.to_thread(self.page_pump.stop, PUMP_STOP_S)
        await self._search.close()
        await self._control.close()
        await self._owner.close()

    async def _listen(self) -> None:
        async for received in self._owner:
            match received.message:
                case m.AttachWorker(hello=hello):
                    self._mac, self._reported = received.peer, None
                    self.pump.attach(hello)
                case m.DetachWorker():
                    self.pump.detach()
                case m.ShowPhase() as phase:
                    if self._phases.full():
                        self._phases.get_nowait()  # only the newest matters
                    self._phases.put_nowait(phase)

    def _note(self, event: m.LinkUp | m.LinkDown | None) -> None:
        """Have it told. When too much waits, the oldest goes: only the newest says how the link stands."""
        if self._told.full():
            log.warning(
                "too many link events at once, the oldest is not told", dropped=str(self._told.get_nowait())
            )
        self._told.put_nowait(event)

    async def _tell(self) -> None:
        """What the pump found out, to whoever attached last; None: the mac process cannot be reached any more."""
        while True:
            event = await self._told.get()
            if event is None:
                self._forget_mac("it does not take answers")
                continue
            self._up = isinstance(event, m.LinkUp)
            if not self._up:
                self._frozen.gone()
            await self._send(event)
            await self._tell_people(event)

    async def _tell_people(self, event: m.LinkUp | m.LinkDown) -> None:
        """Each trouble once: a link that is tried again fails for the same reason many times."""
        if isinstance(event, m.LinkDown):
            text = f"worker refused: {event.detail}" if event.final else f"no worker: {event.detail}"
        else:
            text = "the worker is linked" if self._said else ""
        if self._say is not None and text != self._said:
            self._said = text
            await self._say(text)

    async def _report(self) -> None:
        """The worker's memory and heat, now and then; by sending them, learn whether the mac process is there."""
        while True:
            await asyncio.sleep(REPORT_EVERY_S)
            if self._mac is None:
                continue
            try:
                await self._aim()
                report = await self._control.report()
            except OutriggerError as error:
                report = UNKNOWN
                if self._reported != UNKNOWN:
                    log.info("worker control channel silent", error=str(error))
            await self._told_by_worker(report)

    async def _watch(self) -> None:
        """What the worker says of itself the moment it changes; above all, that its system is about to suspend it."""
        while True:
            if self._mac is not None and self._up:
                with suppress(OutriggerError):  # the reporter says that it is silent
                    await self._aim()
                    async for report in self._control.watch():
                        await self._told_by_worker(report)
            await asyncio.sleep(WATCH_AGAIN_S)

    async def _aim(self) -> None:
        """Talk with the worker that the pump talks with."""
        if (place := self.pump.place) is not None:
            await self._control.aim(place.host, place.control_port)

    async def _told_by_worker(self, report: m.WorkerReported) -> None:
        """Hand it on; fail what is under way at once when the worker is being suspended."""
        if report.state == SUSPENDING and (self._reported is None or self._reported.state != SUSPENDING):
            log.warning("worker is being suspended")
            self.pump.suspended()
            self.page_pump.suspended()
        if report != UNKNOWN:
            self._metrics.set("worker_thermal_state", report.thermal)
            self._metrics.set("worker_available_bytes", report.avail_mb * MIB)
        self._metrics.set_state("worker_condition", "condition", condition_of(report))
        if report.frozen:
            self._frozen.take(report.frozen)
        self._reported = report
        await self._send(report)

    async def _show(self) -> None:
        while True:
            phase = await self._phases.get()
            try:
                await self._control.show(phase)
            except OutriggerError as error:
                log.debug("phase not shown", phase=phase.phase, error=str(error))

    async def _watch_pump(self) -> None:
        """A pump that ended by itself is the end of the process: somebody must start a new one."""
        await self._pump_ended.wait()
        if not self._closing:
            raise ServiceError("the bridge's data thread ended; its log says why")

    def _from_pump(self, do: Callable[..., Any], *values: Any) -> None:
        """Called on the pump's thread: do something on the loop, if that still runs."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(do, *values)

    async def _send(self, message: m.LinkUp | m.LinkDown | m.WorkerReported) -> None:
        if self._mac is None:
            return
        try:
            await self._owner.send(message, to=self._mac)
        except LinkDownError as error:
            self._forget_mac(str(error))

    def _forget_mac(self, why: str) -> None:
        """The mac process vanished: the worker's mirror is of no use to anybody."""
        if self._mac is not None:
            log.warning("mac is gone", reason=why)
            self._mac = None
            if not self._closing:
                self.pump.detach()


def condition_of(report: m.WorkerReported) -> str:
    """How the worker is by its own words, as outrigger_worker_condition has it."""
    if report == UNKNOWN:
        return "silent"
    if report.state == SUSPENDING:
        return SUSPENDING
    return "throttled" if report.thermal >= THERMAL_SERIOUS else "nominal"

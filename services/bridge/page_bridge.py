"""A bridge to one further worker that holds pages and does nothing else: the page pump of a bridge, without a link.

Each has a process of its own (`bridge-1`, ...): a pump that waits for an answer does not sleep, and two of them under
one lock of the interpreter would hold each other up at the moment when both workers answer. Made by
services.bridge.__main__.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

from common.config import BridgeSettings
from common.config.page_workers import PageWorkerPlace, page_worker_places
from common.errors import OutriggerError, ServiceError, SettingError
from common.limits import MIB
from common.metrics import Metrics
from common.wire.deadlines import AckClock
from common.wire.routes import ATTENTION, PAGES, Route
from services.bridge.bridge import PUMP_STOP_S, SUSPENDING, WATCH_AGAIN_S, condition_of
from services.bridge.control import UNKNOWN, ControlClient
from services.bridge.page_pump import PagePump
from services.bridge.page_search import PageSearch
from services.bridge.places import Place
from services.runtime.bus import BlockingOwner, EventSink

LOOK_S = 1.0
FIRST_S = 5.0
"""How long a worker may take to be found before people are told that it is not there."""


class PageBridge:
    """The way to page worker `number`. Make it inside the running loop; spawn `parts`, `close` at the end."""

    def __init__(
        self,
        settings: BridgeSettings,
        number: int,
        metrics: Metrics,
        endpoint: Callable[[Route], str],
        on_bus_event: EventSink | None = None,
        say: Callable[[str], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """`say` takes a sentence for people whenever the worker is lost, and when it is back. Raises SettingError."""
        self._at = place_of(settings, number)
        place = Place(self._at.host, 0, self._at.control_port)
        self._metrics, self._say = metrics, say
        self._closing, self._ended = False, asyncio.Event()
        loop = asyncio.get_running_loop()
        self.pump = PagePump(
            BlockingOwner(ATTENTION, endpoint(ATTENTION), on_event=on_bus_event),
            BlockingOwner(PAGES, endpoint(PAGES), on_event=on_bus_event),
            metrics,
            boot_id=secrets.randbits(63),
            ended=lambda: _on_loop(loop, self._ended.set),
            make_clock=lambda: AckClock(first_s=settings.answer_s_first, floor_s=settings.answer_s_min),
        )
        self._search = PageSearch(self.pump, lambda: place, _as_it_is)
        self._control = ControlClient()

    def parts(self) -> dict[str, Coroutine[Any, Any, None]]:
        """What runs beside each other on the loop, by name. The pump starts with them."""
        self.pump.start()
        return {
            "page search": self._search.run(),
            "pump watch": self._watch_pump(),
            "watcher": self._watch(),
            "teller": self._tell(),
        }

    async def close(self) -> None:
        """Answer what is under way with a failure; close cable and bus."""
        self._closing = True
        await asyncio.to_thread(self.pump.stop, PUMP_STOP_S)
        await self._control.close()

    async def _watch(self) -> None:
        """What the worker says of itself whenever it changes; above all, that its system is about to suspend it."""
        await self._control.aim(self._at.host, self._at.control_port)
        while True:
            with suppress(OutriggerError):  # the teller says that it is not there
                async for report in self._control.watch():
                    if report.state == SUSPENDING:
                        self.pump.suspended()
                    self._metrics.set("worker_thermal_state", report.thermal)
                    self._metrics.set("worker_available_bytes", report.avail_mb * MIB)
                    self._metrics.set_state("worker_condition", "condition", condition_of(report))
            self._metrics.set_state("worker_condition", "condition", condition_of(UNKNOWN))
            await asyncio.sleep(WATCH_AGAIN_S)

    async def _tell(self) -> None:
        """Whether the worker is there, for people. Without a broker nobody connects, and nothing is told."""
        said, wait_s = "", FIRST_S
        while True:
            await asyncio.sleep(wait_s)
            why = self._search.trouble or self.pump.trouble
            text = f"no pages at {self._at}: {why}" if self.pump.wants_place else ""
            if self._say is not None and text != said:
                await self._say(text)
            said, wait_s = text, LOOK_S

    async def _watch_pump(self) -> None:
        """A pump that ended by itself is the end of the process: somebody must start a new one."""
        await self._ended.wait()
        if not self._closing:
            raise ServiceError("the bridge's data thread ended; its log says why")


def place_of(settings: BridgeSettings, number: int) -> PageWorkerPlace:
    """Where page worker `number` is. Raises SettingError when so many are not named."""
    places = page_worker_places(settings.page_workers)
    if not 1 <= number <= len(places):
        raise SettingError(
            f"bridge.page_workers = {settings.page_workers!r} (OUTRIGGER_PAGE_WORKERS) names {len(places)} "
            f"page workers by address; bridge {number} is for number {number}"
        )
    return places[number - 1]


async def _as_it_is(_place: Place, port: int) -> int:
    """Nothing lies between us and the worker's ports."""
    return port


def _on_loop(loop: asyncio.AbstractEventLoop, do: Callable[[], None]) -> None:
    """Called on the pump's thread: do something on the loop, if that still runs."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(do)

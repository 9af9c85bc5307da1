"""Finds the port where a worker holds pages: asks the worker's control channel, as long as somebody wants to know.

A worker may serve pages beside a tail or alone; its command `mem` says where, and how much memory it has left. Behind
usbmux that port is led to from one of loopback. Runs on the bridge's loop; made by services.bridge.bridge.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from common.errors import OutriggerError
from common.limits import MIB
from services.bridge.control import ControlClient
from services.bridge.page_pump import PagePump, PagesPlace
from services.bridge.places import Place

LOOK_EVERY_S = 0.25
NO_PAGES = "the worker there answers, but holds no pages; start it with --pages-only, or with OUTRIGGER_WORKER_PAGES=on"


class PageSearch:
    """`place` is where the worker is, as far as the bridge knows; `reach` says how a port of it is reached."""

    def __init__(
        self,
        pump: PagePump,
        place: Callable[[], Place | None],
        reach: Callable[[Place, int], Awaitable[int]],
    ) -> None:
        self._pump, self._place, self._reach = pump, place, reach
        self._control = ControlClient()
        self.trouble = ""
        """Why the last look found no port; empty when it did, or nobody looked."""

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        try:
            while True:
                place = self._place()
                if place is not None and self._pump.wants_place:
                    try:
                        await self._look(place)
                    except OutriggerError as error:  # no worker there yet
                        self.trouble = str(error)
                await asyncio.sleep(LOOK_EVERY_S)
        finally:
            await self._control.close()

    async def _look(self, place: Place) -> None:
        await self._control.aim(place.host, place.control_port)
        said = await self._control.ask("mem")
        port, available = said.get("pa_port", 0), said.get("avail_mb", 0)
        if isinstance(port, int) and 0 < port < 1 << 16:
            n_mib = available if isinstance(available, int) and available > 0 else 0
            self.trouble = ""
            self._pump.offer(PagesPlace(place.host, await self._reach(place, port), n_mib * MIB))
        else:
            self.trouble = NO_PAGES

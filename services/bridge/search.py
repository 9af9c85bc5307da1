"""Finds places where a worker may be, again and again, as long as no link is up. Runs on the bridge's loop.

    worker_host = an address   that place, and no search
    worker_host = "auto"       neighbours on USB-looking interfaces, then the phone behind usbmux if the extra is there
    worker_host = "usbmux"     the phone behind usbmux only

Whether a worker is there is found out by greeting it; that, and the link itself, is services.bridge.pump's.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import Callable

from common.config import BridgeSettings
from common.log import get_log
from services.bridge import usbmux_forward
from services.bridge.neighbours import neighbours
from services.bridge.places import Place, Places
from services.runtime.guard import PARENT_VARIABLE

log = get_log()

AUTO, USBMUX = "auto", "usbmux"
LOOK_EVERY_S = 3.0
STOP_S = 2.0
NOT_CONFIGURED = "no worker is configured (OUTRIGGER_WORKER_HOST: an address, auto or usbmux)"


def fixed_places(settings: BridgeSettings) -> Places:
    """The places that need no search."""
    if not settings.worker_host:
        return Places(why=NOT_CONFIGURED)
    if settings.worker_host in (AUTO, USBMUX):
        return Places(why="no worker was found yet")
    return Places([Place(settings.worker_host, settings.worker_port, settings.worker_control_port)])


class Search:
    """`run` looks while `wanted()` says so and hands what it finds to `offer`; `close` ends what it started."""

    def __init__(
        self,
        settings: BridgeSettings,
        offer: Callable[[list[Place], str], None],
        wanted: Callable[[], bool],
        look_every_s: float = LOOK_EVERY_S,
    ) -> None:
        self._settings, self._offer, self._wanted = settings, offer, wanted
        self._look_every_s = look_every_s
        self._forward: asyncio.subprocess.Process | None = None
        self._forwarded: Place | None = None

    @property
    def needed(self) -> bool:
        return self._settings.worker_host in (AUTO, USBMUX)

    async def run(self) -> None:
        """Look, offer, wait; for ever. Returns at once when the place is fixed."""
        while self.needed:
            if self._wanted():
                self._offer(*await self.look())
            await asyncio.sleep(self._look_every_s)

    async def look(self) -> tuple[list[Place], str]:
        """(places now, what to say when there is none)."""
        ports = self._settings.worker_port, self._settings.worker_control_port
        places, looked = [], []
        if self._settings.worker_host == AUTO:
            found, interfaces = await neighbours()
            places = [Place(address, *ports, via="usb") for address in found]
            at = ", ".join(interfaces) or "there is none"
            looked.append(f"no neighbour on a USB-looking interface ({at})")
        if usbmux_forward.installed():
            places.append(await self._usbmux_place())
        else:
            looked.append("usbmux needs the extra: pip install 'outrigger[usbmux]'")
        return places, f"no worker was found: {'; '.join(looked)}"

    async def _usbmux_place(self) -> Place:
        """The phone's ports on loopback, forwarded by a process of their own."""
        if self._forwarded is None or self._forward is None or self._forward.returncode is not None:
            local = _free_port(), _free_port()
            remote = self._settings.worker_port, self._settings.worker_control_port
            pairs = [f"{here}:{there}" for here, there in zip(local, remote, strict=True)]
            self._forward = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                usbmux_forward.__name__,
                *pairs,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
                stdin=asyncio.subprocess.DEVNULL,
            )
            self._forwarded = Place("127.0.0.1", local[0], local[1], via="usbmux")
            log.info("usbmux forward started", pid=self._forward.pid, ports=pairs)
        return self._forwarded

    async def close(self) -> None:
        """End the forward, if one runs."""
        child, self._forward = self._forward, None
        if child is not None:
            await usbmux_forward.end_child(child, STOP_S)


def _free_port() -> int:
    """A port of loopback that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

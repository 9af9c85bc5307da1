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
from dataclasses import dataclass

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


@dataclass(frozen=True)
class _Forward:
    """A process that leads ports of loopback to ports of the phone's."""

    process: asyncio.subprocess.Process
    local: tuple[int, ...]


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
        self._forwards: dict[tuple[int, ...], _Forward] = {}
        """By the phone's ports"""

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

    async def reach(self, place: Place, port: int) -> int:
        """The port at place.host by which the worker's `port` is reached: another one behind usbmux."""
        if place.via != USBMUX:
            return port
        return (await self._forwarded(port))[0]

    async def _usbmux_place(self) -> Place:
        port, control = await self._forwarded(self._settings.worker_port, self._settings.worker_control_port)
        return Place("127.0.0.1", port, control, via=USBMUX)

    async def _forwarded(self, *remote: int) -> tuple[int, ...]:
        """Ports of loopback that lead to these of the phone's, as long as a process of their own lives."""
        forward = self._forwards.get(remote)
        if forward is None or forward.process.returncode is not None:
            local = tuple(_free_port() for _ in remote)
            pairs = [f"{here}:{there}" for here, there in zip(local, remote, strict=True)]
            process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                usbmux_forward.__name__,
                *pairs,
                env={**os.environ, PARENT_VARIABLE: str(os.getpid())},
                stdin=asyncio.subprocess.DEVNULL,
            )
            self._forwards[remote] = forward = _Forward(process, local)
            log.info("usbmux forward started", pid=process.pid, ports=pairs)
        return forward.local

    async def close(self) -> None:
        """End the forwards, if some run."""
        while self._forwards:
            _, forward = self._forwards.popitem()
            await usbmux_forward.end_child(forward.process, STOP_S)


def _free_port() -> int:
    """A port of loopback that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]

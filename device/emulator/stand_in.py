"""The emulated device: what device.worker puts in place of its plain parts when --emulate or --faults is given.

One `StandIn` a worker process. It owns the profile, the fault gate and what faults have changed (frozen until, slow
until, memory low until ...); sockets, service and control channel ask it. Made and wired by device.worker.
"""

from __future__ import annotations

import math
import secrets
import socket
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from common.config import WorkerSettings
from common.errors import SettingError
from common.log import get_log
from device import facts
from device.emulator.achieved import calibrated
from device.emulator.faults import Fault, parse_script, read_script
from device.emulator.gate import FaultGate
from device.emulator.link import PAGE_WORDS, RESIDUAL_WORDS, EmulatedSocket, ThawClock, Words
from device.emulator.profiles import PROFILES, parse_profile

if TYPE_CHECKING:
    from device.page_desk import PageDesk
    from device.page_service import PageService
    from device.service import TailService

log = get_log()

LOW_MB = 64
HOT = facts.THERMAL_SERIOUS
NOTICE_S = 0.1
"""A device that is being suspended has about this long to say so."""


class StandIn:
    """Everything about this worker that is emulated. `start` arms the script of the settings."""

    def __init__(self, settings: WorkerSettings) -> None:
        self.profile = parse_profile(settings.emulate) if settings.emulate else PROFILES["loopback"]
        self._script = read_script(settings.faults)
        self._seed = settings.fault_seed
        self.gate = FaultGate(self._perform)
        self.thaw = ThawClock()
        self.shape, self.achieved = calibrated(self.profile)
        self.out_of_memory = False
        self.state = ""
        """A state that overrides the worker's own, when a fault set one."""
        self._sockets: weakref.WeakSet[EmulatedSocket] = weakref.WeakSet()
        self._n_sockets = 0
        self._slow, self._until = 1.0, {"slow": 0.0, "memory-low": 0.0, "restart": 0.0}
        self._greetings: dict[str, float] = {}  # kind -> until when; 0: one greeting
        self._service: TailService | None = None
        self._desk: PageDesk | None = None
        self._notify: Callable[[], None] = lambda: None

    def start(self, service: TailService | None, desk: PageDesk | None, notify: Callable[[], None]) -> None:
        """From now on faults happen, to the tail and to the pages, as far as the worker has them.

        notify: tell those who watch that the state changed.
        """
        self._service, self._desk, self._notify = service, desk, notify
        self.gate.arm(self._script)

    def tell(self) -> list[str]:
        """Lines for people: what is emulated, what was achieved, which faults will come."""
        lines = [f"emulating {self.profile}"]
        if self.achieved is not None:
            lines.append(f"achieved on this machine: {self.achieved}")
        return lines + [f"fault armed: {fault}" for fault in self._script]

    # --- asked by the worker's parts

    def wrap(self, sock: socket.socket) -> EmulatedSocket:
        """The socket of a new connection of the residual channel, on the emulated link."""
        return self._wrap(sock, RESIDUAL_WORDS)

    def wrap_pages(self, sock: socket.socket) -> EmulatedSocket:
        """The same of the attention channel."""
        return self._wrap(sock, PAGE_WORDS)

    def _wrap(self, sock: socket.socket, words: Words) -> EmulatedSocket:
        self._n_sockets += 1
        seed = self._seed + self._n_sockets
        wrapped = EmulatedSocket(sock, self.shape, self.gate, self.thaw, seed, words)
        if self._lasts("restart"):
            wrapped.reset()
        self._sockets.add(wrapped)
        return wrapped

    def memory_fails(self) -> bool:
        """Whether this request is refused for want of memory; one is."""
        fails, self.out_of_memory = self.out_of_memory, False
        return fails

    @property
    def slow(self) -> float:
        """How many times as long computing takes now."""
        return self.profile.slow * (self._slow if self._lasts("slow") else 1.0)

    def spoils_greeting(self, kind: str) -> bool:
        """Whether this greeting meets wrong-version or foreign-model; one without a time is spent by that."""
        until = self._greetings.get(kind)
        if until is None or 0 < until < time.monotonic():
            return False
        if until == 0:
            del self._greetings[kind]
        return True

    # --- facts as the control channel tells them

    def memory(self) -> dict[str, int]:
        """Also the place where a frozen device's control channel stands still: both its answers ask for this."""
        self.thaw.wait()
        found = facts.memory()
        return found | {"avail_mb": min(LOW_MB, found["avail_mb"])} if self._lasts("memory-low") else found

    def thermal(self) -> int:
        return max(HOT, facts.thermal()) if self._slow > 1 and self._lasts("slow") else facts.thermal()

    def machine(self) -> str:
        return f"{facts.machine()}, emulated {self.profile.name}"

    # --- commands of the control channel

    def commands(self) -> dict[str, Callable[[list[str]], dict[str, Any]]]:
        """Further commands of the control channel, by name."""
        return {"fault": self._fault, "faults": self._faults, "disarm": self._disarm}

    def _fault(self, words: list[str]) -> dict[str, Any]:
        """`fault SCRIPT`: arm more, counted from now. Raises SettingError."""
        faults = parse_script(" ".join(words))
        if not faults:
            raise SettingError("fault wants a script, as in: fault cut in chunk 3")
        self.gate.arm(faults)
        return {"ok": True, "armed": len(faults)}

    def _faults(self, _words: list[str]) -> dict[str, Any]:
        """`faults`: which fired and which are still armed."""
        return {
            "fired": [str(fault) for fault in self.gate.fired],
            "armed": [str(fault) for fault in self.gate.armed],
        }

    def _disarm(self, _words: list[str]) -> dict[str, Any]:
        """`disarm`: what is still armed will not happen."""
        return {"ok": True, "disarmed": self.gate.disarm()}

    # --- what faults do

    def _perform(self, fault: Fault) -> None:
        until = math.inf if fault.lasts_s is None else time.monotonic() + fault.lasts_s
        match fault.kind:
            case "cut":
                self._cut()
            case "freeze":
                self.thaw.freeze(fault.value or 0.0)
            case "slow":
                self._slow, self._until["slow"] = fault.value or 1.0, until
            case "memory-low":
                self._until["memory-low"] = until
            case "out-of-memory":
                self.out_of_memory = True
            case "suspend":
                threading.Thread(target=self._suspend, args=(fault.value or 0.0,), daemon=True).start()
            case "restart":
                self._restart(fault.value or 0.0)
            case "wrong-version" | "foreign-model":
                self._greetings[fault.kind] = 0.0 if fault.lasts_s is None else until
        self._notify()

    def _cut(self) -> None:
        for sock in list(self._sockets):
            sock.reset()

    def _suspend(self, seconds: float) -> None:
        """As a system does with an app that leaves the screen: a moment to say so, then nothing runs."""
        self.state = "suspending"
        self._notify()
        time.sleep(NOTICE_S)
        self.thaw.freeze(seconds)
        self.thaw.wait()
        self.state = ""
        self._notify()

    def _restart(self, seconds: float) -> None:
        self._until["restart"] = time.monotonic() + seconds
        self._cut()
        boot_id = secrets.randbits(63)
        if self._service is not None:
            self._service.terms = replace(self._service.terms, boot_id=boot_id)

        def reborn(pages: PageService) -> None:
            pages.terms = replace(pages.terms, boot_id=boot_id)

        if self._desk is not None:
            self._desk.restart(reborn)

    def _lasts(self, kind: str) -> bool:
        return time.monotonic() < self._until[kind]

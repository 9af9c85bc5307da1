"""Which faults are armed and when each fires: the moments come from the socket and the compute thread, time from here.

The gate knows no socket: what a fault does is done by `perform`, which it calls once for each, on the thread where
its moment came. `flip` alone is left to the caller, who holds the bytes. Used by device.emulator.stand_in and link.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from common.log import get_log
from device.emulator.faults import Fault

log = get_log()


@dataclass
class _Armed:
    fault: Fault
    left: int
    """Matching moments to come, this one included."""
    fires_at: float = 0.0


class FaultGate:
    """Arms faults, counts moments, fires each fault once."""

    def __init__(self, perform: Callable[[Fault], None]) -> None:
        self.fired: list[Fault] = []
        self._perform = perform
        self._armed: list[_Armed] = []
        self._changed = threading.Condition()
        self._clockwork: threading.Thread | None = None

    @property
    def armed(self) -> list[Fault]:
        with self._changed:
            return [armed.fault for armed in self._armed]

    def arm(self, faults: Iterable[Fault]) -> None:
        """Let these happen, counted from now."""
        now = time.monotonic()
        with self._changed:
            self._armed += [_Armed(fault, fault.number, now + fault.at_s) for fault in faults]
            if self._clockwork is None and any(each.fault.moment == "at" for each in self._armed):
                self._clockwork = threading.Thread(target=self._watch_clock, name="faults", daemon=True)
                self._clockwork.start()
            self._changed.notify_all()

    def disarm(self) -> int:
        """Let nothing happen that has not happened yet; returns how many faults that were."""
        with self._changed:
            n_armed, self._armed = len(self._armed), []
            return n_armed

    def waits_for(self, *moments: str) -> bool:
        """Whether a fault is armed for one of these moments: if not, nobody needs to look at frames closely."""
        return any(armed.fault.moment in moments for armed in self._armed)

    def moment(self, moment: str, frame: str) -> list[Fault]:
        """The named moment of a frame has come. Performs what was armed for it; returns the flips, for the caller."""
        if not self.waits_for(moment):
            return []
        with self._changed:
            due = [each for each in self._armed if (each.fault.moment, each.fault.frame) == (moment, frame)]
            for each in due:
                each.left -= 1
            firing = [each for each in due if not each.left]
            self._armed = [each for each in self._armed if each not in firing]
        for each in firing:
            self._fire(each.fault)
        return [each.fault for each in firing if each.fault.kind == "flip"]

    def _fire(self, fault: Fault) -> None:
        log.warning("fault", fault=str(fault))
        self.fired.append(fault)
        if fault.kind != "flip":
            self._perform(fault)

    def _watch_clock(self) -> None:
        while True:
            with self._changed:
                timed = [each for each in self._armed if each.fault.moment == "at"]
                if not timed:
                    self._changed.wait()
                    continue
                first = min(timed, key=lambda each: each.fires_at)
                left_s = first.fires_at - time.monotonic()
                if left_s > 0:
                    self._changed.wait(left_s)
                    continue
                self._armed.remove(first)
            self._fire(first.fault)

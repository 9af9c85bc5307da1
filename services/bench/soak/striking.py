"""Carries out a soak's strokes: arms faults of the worker, kills processes, and says what really happened.

A worker that was killed comes back with an empty list of faults; one that cannot be reached is asked again later. Used
by services.bench.soak.run.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from common.errors import ServiceError
from services.bench.drill.system import Struckable
from services.bench.faults.far_end import FarEnd
from services.bench.soak.plan import ENDS, Stroke
from services.launch.vigil import EARLY_S

Answer = TypeVar("Answer")


class Striker:
    """`close` it, which disarms what is still armed."""

    def __init__(self, system: Struckable, on_kill: Callable[[], None]) -> None:
        """on_kill: called just before a process is killed without which no request goes on."""
        self._system, self._on_kill = system, on_kill
        self._end: FarEnd | None = None
        self._worker_pid = self._n_fired = 0
        self._killed: list[str] = []
        self._with_end(self._forget)

    def strike(self, stroke: Stroke) -> None:
        """Do it. A process that did not live long enough to be started again at once is left alone."""
        if stroke.kill:
            self._kill(stroke.kill)
            return

        def arm(end: FarEnd) -> None:
            end.ask("disarm")  # a fault whose moment did not come makes room
            end.ask(f"fault {stroke.script}")

        self._with_end(arm)

    def happened(self) -> list[str]:
        """What struck since the last call: scripts of faults, and "kill NAME"."""
        killed, self._killed = self._killed, []
        fired = self._with_end(lambda end: end.fired(self._n_fired)) or []
        self._n_fired += len(fired)
        return killed + fired

    def close(self) -> None:
        """Nothing more strikes."""
        self._with_end(lambda end: end.ask("disarm"))
        if self._end is not None:
            self._end.close()

    def _kill(self, name: str) -> None:
        pid, uptime_s = self._system.pids().get(name, 0), self._system.system.uptimes_s().get(name, 0.0)
        if not pid or uptime_s < EARLY_S:
            return
        if name in ENDS:
            self._on_kill()
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            self._killed.append(f"kill {name}")

    def _with_end(self, act: Callable[[FarEnd], Answer]) -> Answer | None:
        """What `act` returns of the worker's control channel; None while that cannot be reached."""
        pid = self._system.pids().get("worker", 0)
        if self._end is None or pid != self._worker_pid:
            self._end, self._worker_pid, self._n_fired = self._system.far_end(), pid, 0
        if self._end is None:
            return None
        try:
            return act(self._end)
        except ServiceError:
            self._end.close()
            self._end, self._worker_pid = None, 0
            return None

    def _forget(self, end: FarEnd) -> None:
        """What happened before us is not ours."""
        self._n_fired = len(end.fired(0))

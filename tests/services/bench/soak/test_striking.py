"""A soak's strokes on a real system: a fault happens, a process is killed once it lived long enough, and a worker that
comes back is struck again.

Method: the system as `outrigger run` starts it, with the smallest synthetic model and the emulated worker.
"""

from __future__ import annotations

import time

from common.config import load_settings
from common.model.synthetic import ensure_preset
from services.bench.drill.system import Struckable
from services.bench.soak.plan import Stroke
from services.bench.soak.striking import Striker
from services.launch.vigil import EARLY_S


def test_strokes_are_told_when_they_happened() -> None:
    excused: list[float] = []
    with Struckable(ensure_preset("tiny"), load_settings(None, {})) as system:
        system.wait_whole(90.0)
        striker = Striker(system, lambda: excused.append(time.monotonic()))
        before = system.pids()
        while system.system.uptimes_s()["worker"] <= EARLY_S:
            time.sleep(0.1)
        striker.strike(Stroke(0.0, kill="worker"))
        assert striker.happened() == ["kill worker"] and excused == []
        system.wait_whole(60.0, {"worker": before["worker"]})
        striker.strike(Stroke(0.0, "memory-low for 1 now"))
        told: list[str] = []
        until_s = time.monotonic() + 20
        while not told and time.monotonic() < until_s:
            told += striker.happened()
        assert told == ["memory-low for 1 at 0s"]
        striker.strike(Stroke(0.0, kill="worker"))
        assert striker.happened() == [], "too young to be killed again"
        striker.close()

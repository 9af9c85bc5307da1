"""What this machine can say of itself: memory and heat, in the words of the control channel's `mem`.

Reads the operating system and nothing of ours. A value that cannot be known is -1, never a guess.
"""

from __future__ import annotations

import platform

import psutil

from common.limits import MIB

THERMAL_UNKNOWN, THERMAL_NOMINAL, THERMAL_FAIR, THERMAL_SERIOUS, THERMAL_CRITICAL = -1, 0, 1, 2, 3
FAIR_MARGIN_C = 10.0
"""So close below a sensor's own "high" mark heat counts as fair."""


def memory() -> dict[str, int]:
    """Mebibytes: free for us, in the machine, used by this process, wired by the system (-1 where unknown)."""
    whole = psutil.virtual_memory()
    return {
        "avail_mb": whole.available // MIB,
        "phys_mb": whole.total // MIB,
        "footprint_mb": psutil.Process().memory_info().rss // MIB,
        "sys_wired_mb": getattr(whole, "wired", -MIB) // MIB,
    }


def thermal() -> int:
    """0 nominal, 1 fair, 2 serious, 3 critical by the sensors' own marks; -1 when no sensor has a mark."""
    read = getattr(psutil, "sensors_temperatures", None)
    sensors = [sensor for group in (read() if read else {}).values() for sensor in group]
    return max((thermal_of(s.current, s.high, s.critical) for s in sensors), default=THERMAL_UNKNOWN)


def thermal_of(current: float, high: float | None, critical: float | None) -> int:
    """One sensor's reading in degrees Celsius against its marks."""
    if critical and current >= critical:
        return THERMAL_CRITICAL
    if not high:
        return THERMAL_UNKNOWN
    if current >= high:
        return THERMAL_SERIOUS
    return THERMAL_FAIR if current >= high - FAIR_MARGIN_C else THERMAL_NOMINAL


def machine() -> str:
    """System and processor, without the machine's name."""
    return f"{platform.system()} {platform.machine()}"

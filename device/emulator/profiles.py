"""What a cable is like: bandwidth, round trip, jitter; and how much slower than this machine the device computes.

Pure. `parse_profile` reads what --emulate is given: a name, then changes: "usb-c,rtt=200us,rate=500MB/s,slow=1.4".
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from common.errors import SettingError


@dataclass(frozen=True)
class Profile:
    """A link and a device. 0 means: as this machine does it, nothing is added."""

    name: str
    bytes_per_s: float = 0.0
    """Each way; a USB or Wi-Fi link's two ways do not share it here."""
    round_trip_s: float = 0.0
    """Of 16 bytes by plain TCP, the machine's own share included."""
    jitter_s: float = 0.0
    """Added each way: evenly spread between 0 and this."""
    slow: float = 1.0
    """Computing takes this many times as long."""

    @property
    def shapes(self) -> bool:
        """Whether bytes are held back at all."""
        return bool(self.bytes_per_s or self.round_trip_s or self.jitter_s)

    def __str__(self) -> str:
        if not self.shapes and self.slow == 1:
            return f"{self.name} (nothing added)"
        rate = f"{self.bytes_per_s / 1e6:g} MB/s" if self.bytes_per_s else "full rate"
        jitter = f", jitter {self.jitter_s * 1e6:g} µs" if self.jitter_s else ""
        slow = f", computing ×{self.slow:g}" if self.slow != 1 else ""
        return f"{self.name} ({rate}, {self.round_trip_s * 1e6:g} µs round trip{jitter}{slow})"


PROFILES = {
    profile.name: profile
    for profile in (
        Profile("loopback"),
        Profile("usb-c", bytes_per_s=1.25e9, round_trip_s=96e-6),  # 10 Gb/s; the published round trip
        Profile("usb2", bytes_per_s=40e6, round_trip_s=250e-6),  # 480 Mb/s carry about 40 MB/s
        Profile("wifi", bytes_per_s=25e6, round_trip_s=3e-3, jitter_s=2e-3),
    )
}

SCALES = {
    "rate": {"B/s": 1.0, "kB/s": 1e3, "MB/s": 1e6, "GB/s": 1e9},
    "rtt": {"us": 1e-6, "ms": 1e-3, "s": 1.0},
    "jitter": {"us": 1e-6, "ms": 1e-3, "s": 1.0},
    "slow": {"": 1.0},
}
FIELDS = {"rate": "bytes_per_s", "rtt": "round_trip_s", "jitter": "jitter_s", "slow": "slow"}
RANGES = {"rate": (1e3, 1e12), "rtt": (0.0, 10.0), "jitter": (0.0, 10.0), "slow": (1.0, 1000.0)}


def parse_profile(text: str) -> Profile:
    """The profile that `text` names, changed as it says. Raises SettingError with what is allowed."""
    name, *changes = (piece.strip() for piece in text.split(","))
    if name not in PROFILES:
        raise SettingError(f"worker.emulate is {name!r}; there are {', '.join(PROFILES)}")
    profile = PROFILES[name]
    for change in changes:
        key, value = _change(change)
        changed: dict[str, Any] = {FIELDS[key]: value}
        profile = replace(profile, **changed)
    return profile


def _change(text: str) -> tuple[str, float]:
    key, _, written = text.partition("=")
    if key not in FIELDS:
        raise SettingError(f"worker.emulate: {text!r} is no change of a link; there are {', '.join(FIELDS)}")
    units = SCALES[key]
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([A-Za-z/]*)", written)
    if found is None or found[2] not in units:
        wanted = f"a number with one of {', '.join(units)}" if any(units) else "a plain number"
        raise SettingError(f"worker.emulate: {text!r} is not understood; {key} takes {wanted}")
    value = float(found[1]) * units[found[2]]
    least, most = RANGES[key]
    if not least <= value <= most:
        raise SettingError(f"worker.emulate: {text!r} is out of range; {key} goes from {least:g} to {most:g}")
    return key, value

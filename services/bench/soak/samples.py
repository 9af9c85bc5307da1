"""What processes hold and what gauges say, at one moment and over time; and what must be as it was at the beginning.

Used by services.bench.soak.run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from common.limits import MIB
from services.bench.drill.system import Struckable
from services.bench.faults.footprint import Footprint
from services.bench.scrape import scrape

GAUGES = {
    "gateway": ("zmq_clients",),
    "mac": ("requests_running", "requests_waiting"),
    "bridge": ("worker_up",),
    "broker": ("journal_lag_pages",),
}
"""What must be back when nothing is asked any more; a process that does not run, or a series it lacks, is left out."""
MEMORY_GROWTH_MIB_MIN_MAX = 5.0
"""Most that a process may grow in a minute over the second half; with GROWTH_MIB_MIN together a leak."""
GROWTH_MIB_MIN = 24.0
"""What an allocator may still take over that half without any meaning."""


@dataclass(frozen=True)
class Sample:
    """One moment: seconds since the start, footprints by process, gauges by `process.name`."""

    at_s: float
    held: dict[str, Footprint]
    gauges: dict[str, float]


def take(system: Struckable, at_s: float) -> Sample:
    """Look now. Raises OSError when a process does not serve its metrics, psutil.NoSuchProcess when one is gone."""
    gauges = {}
    held = system.footprints()
    ports = system.settings.metrics
    for process, names in GAUGES.items():
        if process not in held:
            continue
        found = scrape(getattr(ports, f"{process}_port"))
        gauges.update(
            {
                f"{process}.{name}": found[f"outrigger_{name}"]
                for name in names
                if f"outrigger_{name}" in found
            }
        )
    return Sample(at_s, held, gauges)


def not_back(before: Sample, after: Sample) -> list[str]:
    """What is more, or other, at rest after a soak than at rest before it; sentences."""
    found = [
        f"{name}: {text}"
        for name, held in before.held.items()
        if name in after.held
        for text in after.held[name].grown_beyond(held)
    ]
    found += [f"{name} is gone" for name in before.held if name not in after.held]
    found += [
        f"{name} was {value:g} and is {after.gauges.get(name, float('nan')):g}"
        for name, value in before.gauges.items()
        if after.gauges.get(name) != value
    ]
    return found


def growth_mib_per_min(samples: Sequence[Sample], process: str) -> float:
    """Slope of a process's memory over the second half of the samples, by least squares; 0 with fewer than three."""
    half = [each for each in samples[len(samples) // 2 :] if process in each.held]
    if len(half) < 3:
        return 0.0
    x = [each.at_s / 60 for each in half]
    y = [each.held[process].rss_bytes / MIB for each in half]
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - x_mean) ** 2 for a in x)
    return sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


def still_growing(samples: Sequence[Sample]) -> list[str]:
    """Processes whose memory grew steadily over the second half, by more than an allocator's whims; sentences."""
    if not samples:
        return []
    minutes = (samples[-1].at_s - samples[len(samples) // 2].at_s) / 60
    found = []
    for process in samples[-1].held:
        slope = growth_mib_per_min(samples, process)
        if slope > MEMORY_GROWTH_MIB_MIN_MAX and slope * minutes > GROWTH_MIB_MIN:
            found.append(f"{process} grows by {slope:.1f} MiB a minute")
    return found

"""What processes hold and what gauges say, at one moment and over time; and what must be as it was at the beginning.

Used by services.bench.soak.run.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from common.limits import MIB
from services.bench.drill.journal import JournalState, look_at
from services.bench.drill.system import Struckable
from services.bench.faults.footprint import Footprint

GAUGES = {
    "gateway": ("zmq_clients",),
    "mac": ("requests_running", "requests_waiting", "journal_lag_pages"),
    "bridge": ("worker_up", "pages_up"),
    "broker": ("journal_lag_seconds",),
}
"""What must be back when nothing is asked any more; a process that does not run, or a series it lacks, is left out."""
MEMORY_GROWTH_MIB_MIN_MAX = 5.0
"""Most that a process may grow in a minute over the second half; with GROWTH_MIB_MIN together a leak."""
GROWTH_MIB_MIN = 24.0
"""What an allocator may still take over that half without any meaning."""

NO_JOURNAL = JournalState(0, 0, is_locked=False)


@dataclass(frozen=True)
class Sample:
    """One moment: seconds since the start, footprints and process ids by process, gauges by `process.name`."""

    at_s: float
    held: dict[str, Footprint]
    gauges: dict[str, float]
    pids: dict[str, int] = field(default_factory=dict)
    journal: JournalState = NO_JOURNAL


def take(system: Struckable, at_s: float) -> Sample:
    """Look now; gauges of a process that does not answer are left out. Raises psutil.NoSuchProcess."""
    gauges = {}
    held = system.footprints()
    for process, names in GAUGES.items():
        found = system.metrics(process)
        gauges.update(
            {
                f"{process}.{name}": found[f"outrigger_{name}"]
                for name in names
                if f"outrigger_{name}" in found
            }
        )
    journal = look_at(Path(system.settings.broker.journal_dir))
    return Sample(at_s, held, gauges, system.pids(), journal)


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


def second_half(samples: Sequence[Sample], process: str) -> list[Sample]:
    """Of the samples of the life that a process has at the end."""
    pid = samples[-1].pids.get(process) if samples else None
    lived = [each for each in samples if process in each.held and each.pids.get(process) == pid]
    return lived[len(lived) // 2 :]


def growth_mib_per_min(samples: Sequence[Sample], process: str) -> float:
    """Slope of a process's memory over the second half of its last life, by least squares; 0 with fewer than three."""
    half = second_half(samples, process)
    if len(half) < 3:
        return 0.0
    x = [each.at_s / 60 for each in half]
    y = [each.held[process].rss_bytes / MIB for each in half]
    x_mean, y_mean = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - x_mean) ** 2 for a in x)
    return sum((a - x_mean) * (b - y_mean) for a, b in zip(x, y, strict=True)) / spread if spread else 0.0


def still_growing(samples: Sequence[Sample]) -> list[str]:
    """Processes whose memory grew steadily over that half, by more than an allocator's whims; sentences."""
    found = []
    for process in samples[-1].held if samples else ():
        half = second_half(samples, process)
        minutes = (half[-1].at_s - half[0].at_s) / 60
        slope = growth_mib_per_min(samples, process)
        if slope > MEMORY_GROWTH_MIB_MIN_MAX and slope * minutes > GROWTH_MIB_MIN:
            found.append(f"{process} grows by {slope:.1f} MiB a minute")
    return found

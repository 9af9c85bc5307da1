"""What a broker's journal is like on disk: its files, their bytes, and whether somebody holds its lock.

Looks from outside and changes nothing. Used by services.bench.drill.system and services.bench.soak.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from services.launch.lock import is_held


@dataclass(frozen=True)
class JournalState:
    """One look."""

    n_files: int
    n_bytes: int
    is_locked: bool
    """A broker has it."""

    def wrong(self, known_bytes: float, bytes_max: int) -> list[str]:
        """What is not as it must be while a broker runs that knows of known_bytes; sentences."""
        found = []
        if not self.is_locked:
            found.append("a broker runs and nobody holds the journal's lock")
        if self.n_bytes != known_bytes:
            found.append(
                f"the journal has {self.n_bytes} bytes on disk and the broker knows of {known_bytes:.0f}"
            )
        if self.n_bytes > bytes_max:
            found.append(f"the journal has {self.n_bytes} bytes and may have {bytes_max}")
        return found


def look_at(directory: Path) -> JournalState:
    """The journal in this folder; one that is not there is empty. A file may go while we look: it does not count."""
    sizes = []
    for path in directory.glob("*.journal"):
        try:
            sizes.append(path.stat().st_size)
        except FileNotFoundError:
            continue
    return JournalState(len(sizes), sum(sizes), is_held(directory))

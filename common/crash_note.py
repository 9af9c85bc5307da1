"""What a process is doing in native code, kept where its death cannot take it: a small file mapped into memory.

Before a native call a thread writes one line into its slot; that costs a memory copy, no system call. When the process
is killed, whatever the way, the line is still in the file, and whoever cleans up after it can say what was running. The
file carries the process's pid, so that the next life of the process does not write over it. Knows no process and no
call; written by services/mac, services/gateway and device, read by services/launch.
"""

from __future__ import annotations

import mmap
import os
from contextlib import suppress
from pathlib import Path

SLOTS, SLOT_BYTES = 16, 256
SUFFIX = ".doing"


class Slot:
    """One thread's line. Without memory of a note it writes where nobody reads."""

    def __init__(self, memory: memoryview | None = None) -> None:
        self._memory = memoryview(bytearray(SLOT_BYTES)) if memory is None else memory

    def write(self, text: str) -> None:
        """What this thread does from now on; what does not fit is cut."""
        line = text.encode()[: SLOT_BYTES - 1] + b"\0"
        self._memory[: len(line)] = line

    def clear(self) -> None:
        """It is in no native code worth telling."""
        self._memory[0] = 0


class CrashNote:
    """The file of one process: `slot()` for each thread, `remove` at a good end."""

    def __init__(self, run_dir: Path, process: str, pid: int) -> None:
        self._path = note_path(run_dir, process, pid)
        self._memory = memoryview(_mapped(self._path) or bytearray(SLOTS * SLOT_BYTES))
        self._n_slots = 0

    def slot(self) -> Slot:
        """A slot of one's own. Threads beyond the last one share it."""
        start = min(self._n_slots, SLOTS - 1) * SLOT_BYTES
        self._n_slots += 1
        return Slot(self._memory[start : start + SLOT_BYTES])

    def remove(self) -> None:
        """The process ends well: nobody needs to know."""
        self._path.unlink(missing_ok=True)


def _mapped(path: Path) -> mmap.mmap | None:
    """A new file of all slots in memory; None where there is no room. Written out whole: a hole would kill us later."""
    n_bytes = SLOTS * SLOT_BYTES
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError:
        return None
    try:
        return mmap.mmap(fd, n_bytes) if os.write(fd, bytes(n_bytes)) == n_bytes else None
    except OSError:
        return None
    finally:
        os.close(fd)


def note_path(run_dir: Path, process: str, pid: int) -> Path:
    """Where a process keeps its note."""
    return run_dir / f"{process}.{pid}{SUFFIX}"


def read_note(run_dir: Path, process: str, pid: int) -> list[str]:
    """What the process was doing, one line a thread that did something; empty when it kept no note."""
    try:
        content = note_path(run_dir, process, pid).read_bytes()
    except OSError:
        return []
    slots = [content[start : start + SLOT_BYTES] for start in range(0, len(content), SLOT_BYTES)]
    lines = [slot.partition(b"\0")[0].decode("utf-8", "replace") for slot in slots]
    return [line for line in lines if line]


def remove_notes(run_dir: Path) -> None:
    """Take away what earlier processes left."""
    for path in run_dir.glob(f"*{SUFFIX}"):
        with suppress(OSError):
            path.unlink()

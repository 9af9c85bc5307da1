"""How processes ended: one line of JSON each, written by the supervisor's process, read by launch.

Append-only and read from where the last look stopped, so that a process that ends twice between two looks is counted
twice. Knows no log and no reason; endings.py makes a sentence of it.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec

FILE = "ends.jsonl"


@dataclass(frozen=True)
class End:
    """One process's end: by exit code, or by signal (then code is -1)."""

    process: str
    pid: int
    code: int
    signal: str
    """SIGSEGV and the like; empty when it exited by itself."""
    at: float
    """Seconds since 1970."""

    @classmethod
    def of(cls, process: str, pid: int, status: int) -> End:
        """From a status as waitpid gives it."""
        if os.WIFSIGNALED(status):
            number = os.WTERMSIG(status)
            names = {each.value: each.name for each in signal.Signals}
            return cls(process, pid, -1, names.get(number, f"signal {number}"), time.time())
        return cls(process, pid, os.WEXITSTATUS(status), "", time.time())


def append_end(run_dir: Path, end: End) -> None:
    """Write an end down; the line appears whole, or not at all: a full disk must not end the supervisor."""
    line = msgspec.json.encode(asdict(end)) + b"\n"
    with suppress(OSError):
        fd = os.open(run_dir / FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            n_before = os.fstat(fd).st_size
            if os.write(fd, line) < len(line):
                os.ftruncate(fd, n_before)
        finally:
            os.close(fd)


class EndReader:
    """Ends that were not read yet. Begins with an empty file."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / FILE
        self._path.unlink(missing_ok=True)
        self._offset = 0

    def read(self) -> list[End]:
        """Ends since the last call, in order."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            return []
        whole = text[: text.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [msgspec.json.decode(line, type=End) for line in whole.splitlines()]

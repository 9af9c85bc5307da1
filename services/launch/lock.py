"""One launch for a run directory: a lock that the system itself releases, and a note of who holds it."""

from __future__ import annotations

import fcntl
import json
import os
from pathlib import Path
from typing import Any

from common.errors import ServiceError

LOCK = "launch.lock"
NOTE = "launch.json"


class RunLock:
    """Held from start to end. Raises ServiceError naming what runs already when somebody else holds it."""

    def __init__(self, run_dir: Path) -> None:
        self._note = run_dir / NOTE
        self._fd = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise ServiceError(_already(run_dir)) from None
        self.write({"pid": os.getpid(), "state": "starting"})

    def write(self, note: dict[str, Any]) -> None:
        """Say what runs; the file is always whole."""
        partial = self._note.with_suffix(".partial")
        partial.write_text(json.dumps(note))
        os.replace(partial, self._note)

    def release(self) -> None:
        """Nothing runs any more."""
        self._note.unlink(missing_ok=True)
        os.close(self._fd)


def read_note(run_dir: Path) -> dict[str, Any]:
    """What the holder of the lock wrote; empty when it cannot be read."""
    try:
        return json.loads((run_dir / NOTE).read_text())
    except (OSError, ValueError):
        return {}


def _already(run_dir: Path) -> str:
    note = read_note(run_dir)
    pid = note.get("pid")
    what = f"pid {pid}" if pid else "another process"
    if note.get("model"):
        what += f", model {note['model']}, {note.get('http')}"
    stop = f"kill {pid}" if pid else "its Ctrl-C"
    return (
        f"it runs already ({what}, run directory {run_dir}). Stop it with {stop}, or give this one a place of its "
        f"own: OUTRIGGER_RUN_DIR=DIR, --port 0 and other metrics ports"
    )

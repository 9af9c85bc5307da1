"""One launch for a run directory: a lock that the system itself releases, and a note of who holds it.

The lock is the truth: a note without it was left by a launch that was killed. Asked by `up`, `down` and `status`, too.
"""

from __future__ import annotations

import fcntl
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from common.errors import ServiceError, SettingError

LOCK = "launch.lock"
NOTE = "launch.json"


class RunLock:
    """Held from start to end.

    Raises ServiceError naming what runs already when somebody else holds it, SettingError when nothing can be written.
    """

    def __init__(self, run_dir: Path) -> None:
        self._note = run_dir / NOTE
        try:
            self._fd = os.open(run_dir / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise _unwritable(error) from None
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(self._fd)
            raise ServiceError(already_text(run_dir)) from None
        self.left_behind = read_note(run_dir)
        """The note of a launch that was killed here; empty when the last one ended in order."""
        try:
            self.write({"pid": os.getpid(), "state": "starting"})
        except SettingError:
            self.release()
            raise

    def write(self, note: dict[str, Any]) -> None:
        """Say what runs; the file is always whole. Raises SettingError when there is no room for it."""
        partial = self._note.with_suffix(".partial")
        try:
            partial.write_text(json.dumps(note))
            os.replace(partial, self._note)
        except OSError as error:
            with suppress(OSError):
                partial.unlink()
            raise _unwritable(error) from None

    def release(self) -> None:
        """Nothing runs any more."""
        with suppress(OSError):
            self._note.unlink(missing_ok=True)
        os.close(self._fd)


def _unwritable(error: OSError) -> SettingError:
    return SettingError(
        f"run_dir: cannot write {error.filename or 'there'}: {(error.strerror or str(error)).lower()}; make room, or "
        f"choose another directory (OUTRIGGER_RUN_DIR)"
    )


def is_held(path: Path) -> bool:
    """Whether a living process holds the lock of `path`, a file or (a broker's journal) a folder."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def running(run_dir: Path) -> dict[str, Any] | None:
    """The note of the launch that runs here; empty in its first moment; None when none runs."""
    return read_note(run_dir) if is_held(run_dir / LOCK) else None


def read_note(run_dir: Path) -> dict[str, Any]:
    """What the last holder of the lock wrote; empty when it cannot be read."""
    try:
        return json.loads((run_dir / NOTE).read_text())
    except (OSError, ValueError):
        return {}


def already_text(run_dir: Path) -> str:
    """What runs already, and how to end it or to go elsewhere."""
    note = read_note(run_dir)
    pid = note.get("pid")
    what = f"pid {pid}, {note.get('state', '')}" if pid else "another process"
    if note.get("model"):
        what += f", model {note['model']}, {note.get('http')}"
    return (
        f"it runs already ({what}, run directory {run_dir}). Stop it with `outrigger down`, or give this one a place "
        f"of its own: OUTRIGGER_RUN_DIR=DIR, and free ports: --port 0, OUTRIGGER_ZMQ_PORT=0, "
        f"OUTRIGGER_ZMQ_EVENTS_PORT=0, and 0 for the metrics ports that `outrigger config show metrics` lists"
    )

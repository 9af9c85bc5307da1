"""The lock of the journal's folder: one broker a folder, for as long as the process lives. Called by broker.py."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from common.errors import SettingError


def claim(directory: Path) -> int:
    """Make the journal's folder and lock it for this process; returns the descriptor that holds the lock.

    Raises SettingError.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(directory, os.O_RDONLY)
    except OSError as error:
        raise SettingError(
            f"journal_dir: cannot make {directory}: {error.strerror}; choose another folder (OUTRIGGER_JOURNAL_DIR)"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(lock)
        raise SettingError(
            f"journal_dir: another broker keeps its journal in {directory}; choose another folder "
            f"(OUTRIGGER_JOURNAL_DIR)"
        ) from error
    return lock

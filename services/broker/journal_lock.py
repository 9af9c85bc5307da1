"""The lock of the journal's folder: one broker a folder, for as long as both live. Called by broker.py."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

from common.errors import ServiceError, SettingError


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


def check_claim(directory: Path, lock: int) -> None:
    """Raise ServiceError when somebody removed the folder: what is written there from now on nobody could read.

    The next life of the broker makes it anew, and claims it.
    """
    mine = os.fstat(lock)
    try:
        there = os.stat(directory)
    except OSError:
        there = None
    if there is None or (there.st_dev, there.st_ino) != (mine.st_dev, mine.st_ino):
        raise ServiceError(
            f"journal_dir: {directory} was removed while the broker used it; the broker begins anew with an empty one. "
            f"To empty the journal, stop the system first (outrigger down)"
        )

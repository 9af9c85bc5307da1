"""The run directory: one set of processes, its sockets, logs and state. Private to the user, whatever the umask says.

Made by launch or by the first process that needs it; who may use a directory is decided in endpoints.
"""

from __future__ import annotations

from pathlib import Path

from common.errors import SettingError
from services.runtime.endpoints import check_private_directory


def open_run_dir(path: Path) -> Path:
    """Make `path`, and its parent when that is missing, with mode 0700; check that they are ours and closed to others.

    The parent is checked too when it carries our name: in a shared temporary folder anybody could have made it first.
    Raises SettingError.
    """
    try:
        for directory in (path.parent, path):
            if not directory.exists():
                directory.mkdir(mode=0o700, parents=True, exist_ok=True)
                directory.chmod(0o700)
    except OSError as error:
        raise SettingError(
            f"run_dir: cannot make {path}: {error.strerror}; choose another directory (OUTRIGGER_RUN_DIR)"
        ) from error
    if path.parent.name.startswith("outrigger-"):
        check_private_directory(path.parent)
    check_private_directory(path)
    return path

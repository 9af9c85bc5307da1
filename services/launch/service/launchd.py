"""The property list of a launchd agent. Pure; used by services.launch.service.plan. Never loaded on a Mac."""

from __future__ import annotations

import plistlib
from pathlib import Path

LABEL = "org.outrigger.serve"
LOG_KB_MAX, LOGS_KEPT = 10_240, 5
THROTTLE_S = 10
"""A launch that ends by itself is not started again sooner."""


def plist(command: tuple[str, ...], folder: Path, environ: dict[str, str], log: Path, stop_s: float) -> bytes:
    """XML. stop_s: how long launchd waits between SIGTERM, on which answers end, and SIGKILL."""
    return plistlib.dumps(
        {
            "Label": LABEL,
            "ProgramArguments": list(command),
            "WorkingDirectory": str(folder),
            "EnvironmentVariables": environ,
            "RunAtLoad": True,
            "KeepAlive": {"SuccessfulExit": False},
            "ThrottleInterval": THROTTLE_S,
            "ExitTimeOut": round(stop_s),
            "ProcessType": "Interactive",
            "StandardOutPath": str(log),
            "StandardErrorPath": str(log),
        },
        sort_keys=False,
    )


def newsyslog(log: Path, user: str) -> str:
    """A line of newsyslog.conf that rotates the log by size.

    The log has a line for a start and for each thing told; launchd writes on to the old file until the next start.
    """
    return f"{log}\t{user}:staff\t600\t{LOGS_KEPT}\t{LOG_KB_MAX}\t*\tNJ"

"""Which files make Outrigger a service here, where they go, and what is run afterwards. Pure but for writing them.

Used by services.cli.service.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from common.errors import SettingError
from services.launch.service.launchd import LABEL, newsyslog, plist
from services.launch.service.systemd import UNIT, unit

Kind = Literal["launchd", "systemd"]


@dataclass(frozen=True)
class Service:
    """What is served, for whom."""

    command: tuple[str, ...]
    folder: Path
    """Working directory."""
    environ: dict[str, str]
    """Settings of the service, by variable."""
    log: Path
    """launchd has no journal: what `outrigger run` says goes there."""
    stop_s: float
    """How long a stop may take: answers being written get `gateway.drain_s` of it."""
    user: str


@dataclass(frozen=True)
class Plan:
    """Files, contents by path, then commands to type."""

    files: dict[Path, bytes]
    commands: tuple[str, ...]
    notes: tuple[str, ...] = ()


def plan(kind: Kind, service: Service, home: Path) -> Plan:
    """What an installation for one user does. Nothing is written here."""
    if kind == "launchd":
        path = home / "Library" / "LaunchAgents" / f"{LABEL}.plist"
        return Plan(
            {path: plist(service.command, service.folder, service.environ, service.log, service.stop_s)},
            (f"launchctl bootstrap gui/$(id -u) '{path}'",),
            (
                f"to stop: launchctl bootout gui/$(id -u)/{LABEL} (answers being written get time to end)",
                "log rotation needs root: write the next line to /etc/newsyslog.d/outrigger.conf",
                newsyslog(service.log, service.user),
            ),
        )
    path = home / ".config" / "systemd" / "user" / UNIT
    return Plan(
        {path: unit(service.command, service.folder, service.environ, service.stop_s).encode()},
        ("systemctl --user daemon-reload", f"systemctl --user enable --now {UNIT}"),
        (
            "to serve without anybody logged in: loginctl enable-linger",
            "logs: journalctl --user -u outrigger (the journal rotates by itself), and `outrigger logs`",
        ),
    )


def install(planned: Plan) -> None:
    """Write the files. Raises SettingError when one is there that differs, OSError."""
    for path, content in planned.files.items():
        if path.exists() and path.read_bytes() != content:
            raise SettingError(
                f"{path} is there already and differs: move it away, or compare with --dry-run"
            )
    for path, content in planned.files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_name(f"{path.name}.partial")
        partial.write_bytes(content)
        os.replace(partial, path)

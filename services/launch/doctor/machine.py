"""Looks at this machine and at the settings' files and ports. Changes nothing. Used by services.cli.doctor."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path

import psutil

from common.config import Settings
from common.errors import OutriggerError
from common.limits import MIB
from common.model.spec import ModelSpec
from common.model.split import plan_split
from common.wire.fingerprint import fingerprint
from services.bench.machine import machine_text
from services.bridge.neighbours import cable_interfaces, on_usb
from services.launch.doctor.facts import Interface, Machine, Model, Port
from services.launch.ports import holder, needed_ports, why_taken
from services.launch.programs import starts_worker

WIRED_LIMIT = "iogpu.wired_limit_mb"
DIGEST_CHARS = 12


def look_at_machine() -> Machine:
    """The host, without its name."""
    memory = psutil.virtual_memory()
    return Machine(
        platform.system(),
        platform.machine(),
        machine_text().rpartition(",")[0],
        os.cpu_count() or 1,
        memory.total // MIB,
        memory.available // MIB,
        platform.python_version(),
        wired_limit_mb() if platform.system() == "Darwin" else None,
    )


def wired_limit_mb() -> int | None:
    """What a Mac's GPU may hold, 0 for the system's own choice; None when it does not say."""
    try:
        said = subprocess.run(
            ["sysctl", "-n", WIRED_LIMIT], capture_output=True, text=True, timeout=10, check=True
        )
        return int(said.stdout)
    except (OSError, ValueError, subprocess.SubprocessError):
        return None


def look_at_model(settings: Settings) -> Model:
    """The model that is set; a problem instead when it cannot be used."""
    try:
        spec = ModelSpec.read(settings.host.model)
        layer = plan_split(spec, settings.host.split_layer, any_layer=True).layer
        text = spec.fingerprint_text(layer)
    except (OutriggerError, OSError) as error:
        return Model(problem=_without_path(str(error), settings.host.model))
    digest = fingerprint(text).hex()[:DIGEST_CHARS]
    return Model("", spec.arch, spec.n_layer_full, spec.file_bytes // MIB, layer, digest)


def _without_path(text: str, path: str) -> str:
    """Profiles go to others: the model's place says who its owner is."""
    return text.replace(path, Path(path).name)


def look_at_interfaces() -> tuple[Interface, ...]:
    """Interfaces that may be a cable, with the speed the system tells."""
    stats = psutil.net_if_stats()
    return tuple(Interface(on_usb(name), stats[name].speed or None) for name in sorted(cable_interfaces()))


def look_at_ports(settings: Settings) -> tuple[Port, ...]:
    """Those of our ports that cannot be taken now."""
    found = []
    for host, port, purpose, _flag, variable in needed_ports(settings, local_worker=starts_worker(settings)):
        if port and (error := why_taken(host, port)):
            reason = (error.strerror or "cannot be taken").lower()
            found.append(Port(port, purpose, variable, reason, holder(port) or ""))
    return tuple(found)


def disk_free_mb(settings: Settings) -> int | None:
    """Free space where the journal goes, or would go."""
    place = Path(settings.broker.journal_dir or settings.data_dir).absolute()
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        return shutil.disk_usage(place).free // MIB
    except OSError:
        return None

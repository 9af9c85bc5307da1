"""Ports: whether one is free, one that is, and who holds one that is not."""

from __future__ import annotations

import errno
import socket
from pathlib import Path

from common.config import Settings
from common.config.page_workers import worker_numbers
from common.errors import ServiceError
from services.runtime.service import numbered_port

LISTENS = "0A"
"""State of a listening socket in /proc/net/tcp."""


def check_ports(settings: Settings, *, local_worker: bool) -> None:
    """Raise ServiceError, with the holder and the setting to change, when a port that we need is taken."""
    for host, port, purpose, flag, variable in needed_ports(settings, local_worker=local_worker):
        _check_port(host, port, purpose, flag, variable)


def needed_ports(settings: Settings, *, local_worker: bool) -> list[tuple[str, int, str, str, str]]:
    """(address, port, what for, flag or "", variable without prefix) of every port of these settings; 0: any free."""
    needed = [
        (settings.gateway.http_host, settings.gateway.http_port, "the HTTP API", "--port", "HTTP_PORT"),
        ("127.0.0.1", settings.metrics.gateway_port, "/metrics of the gateway", "", "GATEWAY_METRICS_PORT"),
        ("127.0.0.1", settings.metrics.mac_port, "/metrics of the mac process", "", "MAC_METRICS_PORT"),
        ("127.0.0.1", settings.metrics.broker_port, "/metrics of the broker", "", "BROKER_METRICS_PORT"),
    ]
    if settings.zmq.door == "on":
        needed += [
            (settings.zmq.host, settings.zmq.port, "the ZeroMQ endpoint", "", "ZMQ_PORT"),
            (settings.zmq.host, settings.zmq.events_port, "the ZeroMQ events", "", "ZMQ_EVENTS_PORT"),
        ]
    if settings.host.split == "on":
        needed.append(
            ("127.0.0.1", settings.metrics.bridge_port, "/metrics of the bridge", "", "BRIDGE_METRICS_PORT")
        )
    for number in range(1, len(worker_numbers(settings)) + (settings.host.split == "off")):
        port = numbered_port(settings.metrics.bridge_port, number)
        needed.append(
            ("127.0.0.1", port, f"/metrics of the bridge to page worker {number}", "", "BRIDGE_METRICS_PORT")
        )
    if local_worker:
        needed += [
            ("127.0.0.1", settings.worker.port, "the worker", "", "LISTEN_PORT"),
            ("127.0.0.1", settings.worker.control_port, "the worker's control", "", "LISTEN_CONTROL_PORT"),
        ]
    return needed


def _check_port(host: str, port: int, purpose: str, flag: str, variable: str) -> None:
    """Raise ServiceError when it is taken."""
    if not port or (error := why_taken(host, port)) is None:
        return
    reason = (error.strerror or str(error)).lower()
    if error.errno != errno.EADDRINUSE:
        raise ServiceError(
            f"cannot listen on {host}, port {port}, for {purpose}: {reason}. The address must be one of this "
            f"machine's, and ports below 1024 may need rights; see the settings around OUTRIGGER_{variable}"
        )
    held = holder(port)
    by = f" by {held}" if held else ""
    options = f"{flag} PORT or " if flag else ""
    raise ServiceError(
        f"port {port} of {host}, for {purpose}, is not free: {reason}{by}. Stop that process, or choose "
        f"another port with {options}OUTRIGGER_{variable} (0: any free one)"
    )


def why_taken(host: str, port: int) -> OSError | None:
    """What the system says against listening there; None when it can be done."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            return error
    return None


def free_ports(n: int) -> list[int]:
    """n ports of loopback that are free now. Held together while looking, so that they differ."""
    probes = [socket.socket() for _ in range(n)]
    try:
        for probe in probes:
            probe.bind(("127.0.0.1", 0))
        return [probe.getsockname()[1] for probe in probes]
    finally:
        for probe in probes:
            probe.close()


def holder(port: int) -> str | None:
    """The process that listens on `port`, as "name (pid n)"; None where the system does not tell."""
    inodes = _listening_inodes(port)
    if not inodes:
        return None
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if any(_target(link) in inodes for link in (process / "fd").iterdir()):
                return f"{(process / 'comm').read_text().strip()} (pid {process.name})"
        except OSError:
            continue  # gone by now, or somebody else's
    return None


def _target(link: Path) -> str:
    """What a descriptor points at; nothing when it was closed meanwhile."""
    try:
        return str(link.readlink())
    except FileNotFoundError:
        return ""


def _listening_inodes(port: int) -> set[str]:
    """Sockets that listen on `port`, as /proc names them. Empty on systems without /proc."""
    found = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        try:
            rows = table.read_text().splitlines()[1:]
        except OSError:
            continue
        for row in rows:
            fields = row.split()
            if fields[3] == LISTENS and int(fields[1].rpartition(":")[2], 16) == port:
                found.add(f"socket:[{fields[9]}]")
    return found

"""Asks the worker: memory and heat over its control channel, and, when nobody uses its link, a greeting and chunks.

A worker has one link. While a launch runs it is in use and left alone. Used by services.cli.doctor.
"""

from __future__ import annotations

import ipaddress
import socket
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np

from common.config import Settings
from common.errors import OutriggerError
from common.limits import UBATCH_TOKENS
from common.model.spec import ModelSpec
from common.model.split import plan_split
from services.bench.faults.far_end import FarEnd as ControlChannel
from services.bench.link import BridgeEnd
from services.launch.doctor.facts import Cable, FarEnd, Interface

N_ASKED, N_PINGS, N_CHUNKS = 20, 50, 8
UNKNOWN = -1
CONNECT_S = 3.0


def worker_address(settings: Settings) -> tuple[str, int, int] | None:
    """(host, port, control port) of the worker that should be there already; None when a start would make one."""
    bridge = settings.bridge
    if settings.host.split == "off" or bridge.worker_host in ("", "auto", "usbmux"):
        return None
    return bridge.worker_host, bridge.worker_port, bridge.worker_control_port


def ask_worker(address: tuple[str, int, int]) -> FarEnd:
    """What its control channel says."""
    try:
        channel = ControlChannel(address[2], address[0])
    except OSError as error:
        return FarEnd(True, why_not=f"control port {address[2]}: {(error.strerror or str(error)).lower()}")
    try:
        took_s, said = [], {}
        for _ in range(N_ASKED):
            began_s = time.perf_counter()
            said = channel.ask("mem")
            took_s.append(time.perf_counter() - began_s)
    except OutriggerError as error:
        return FarEnd(True, why_not=str(error))
    finally:
        channel.close()
    return FarEnd(
        True,
        True,
        machine=str(said.get("machine", "")),
        state=str(said.get("state", "")),
        memory_mb=said.get("phys_mb"),
        memory_free_mb=said.get("avail_mb"),
        thermal=said.get("thermal", UNKNOWN),
        control_us=round(1e6 * median(took_s), 1),
        pages=_pages(address[0], said.get("pa_port", 0)),
    )


def _pages(host: str, port: int) -> str:
    """Whether the port for pages that it names can be reached."""
    if not port:
        return "off"
    try:
        socket.create_connection((host, port), CONNECT_S).close()
    except OSError:
        return "closed"
    return "on"


def measure_cable(
    settings: Settings, address: tuple[str, int, int], interfaces: tuple[Interface, ...]
) -> tuple[Cable, str]:
    """(round trip and bandwidth, why the greeting was refused). Uses the worker's only link for a second."""
    loopback = _is_loopback(address[0])
    try:
        spec = ModelSpec.read(settings.host.model)
        layer = plan_split(spec, settings.host.split_layer, any_layer=True).layer
        with tempfile.TemporaryDirectory(prefix="outrigger-") as folder:
            end = BridgeEnd(address[:2], Path(folder), spec, layer)
            try:
                round_trip_us = 1e6 * median(_seconds(end.ping) for _ in range(N_PINGS))
                residual = np.ones((UBATCH_TOKENS, spec.n_embd), np.float32)
                end.chunks(residual, 1)
                rate = N_CHUNKS * residual.nbytes / 1e6 / _seconds(lambda: end.chunks(residual, N_CHUNKS))
            finally:
                end.close()
    except (OutriggerError, OSError) as error:
        return Cable(interfaces, loopback, why_not_measured="the worker did not take our greeting"), str(
            error
        )
    return Cable(interfaces, loopback, round(round_trip_us, 1), round(rate, 1)), ""


def unmeasured(
    address: tuple[str, int, int] | None,
    interfaces: tuple[Interface, ...],
    why: str,
    control_us: float | None,
) -> Cable:
    """What is known of a cable that is in use: the interfaces, and the round trip of the control channel."""
    return Cable(interfaces, bool(address) and _is_loopback(address[0]), control_us, None, why)  # type: ignore[index]


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _seconds(do: object) -> float:
    began_s = time.perf_counter()
    do()  # type: ignore[operator]
    return time.perf_counter() - began_s

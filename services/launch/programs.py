"""Which processes a set of settings needs, and the settings each of them is to load. Pure; starts nothing."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace

from msgspec import structs

from common.config import Settings

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Program:
    """One process: its name, its command, and whether it tells launch over the bus how it is."""

    name: str
    command: tuple[str, ...]
    on_bus: bool = True
    drain_s: float = 0.0
    """How long it may take to end what runs, once told to stop."""


def module(name: str, dotted: str, *, on_bus: bool = True) -> Program:
    """A Python module of ours as a process."""
    return Program(name, (sys.executable, "-m", dotted), on_bus)


MAC = module("mac", "services.mac")
GATEWAY = module("gateway", "services.gateway")
BROKER = module("broker", "services.broker")
BRIDGE = module("bridge", "services.bridge")
WORKER = module("worker", "device.worker", on_bus=False)
"""Speaks the cable's protocol and nothing else: its control channel says how it is."""


def starts_worker(settings: Settings) -> bool:
    """Whether the worker is one that we start on this machine."""
    return settings.host.split == "on" and not settings.bridge.worker_host


def programs_for(settings: Settings, local_worker: bool) -> tuple[Program, ...]:
    """The processes of these settings, in the order in which people name them."""
    gateway = replace(GATEWAY, drain_s=settings.gateway.drain_s)
    if settings.host.split == "off":
        return (gateway, MAC, BROKER)
    return (gateway, MAC, BROKER, BRIDGE, WORKER) if local_worker else (gateway, MAC, BROKER, BRIDGE)


def with_local_worker(settings: Settings, tail: str, ports: tuple[int, int]) -> Settings:
    """`settings` with a worker on this machine: it serves `tail` on `ports`, and the bridge looks for it there."""
    host, (port, control_port) = settings.host, ports
    return structs.replace(
        settings,
        worker=structs.replace(
            settings.worker,
            model=tail,
            host=LOOPBACK,
            port=port,
            control_port=control_port,
            n_ctx=host.n_ctx,
            weights=host.weights,
        ),
        bridge=structs.replace(
            settings.bridge, worker_host=LOOPBACK, worker_port=port, worker_control_port=control_port
        ),
    )

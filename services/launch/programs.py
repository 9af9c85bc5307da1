"""Which processes a set of settings needs, and the settings each of them is to load. Pure; starts nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from common.config import Settings
from common.config.page_workers import PageWorkerPlace, page_worker_places
from services.runtime.service import process_name

LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class Program:
    """One process: its name, its command, and whether it tells launch over the bus how it is."""

    name: str
    command: tuple[str, ...]
    on_bus: bool = True
    drain_s: float = 0.0
    """How long it may take to end what runs, once told to stop."""
    control_port: int = 0
    """On loopback, of one that is not on the bus; 0: as the settings of the worker say."""


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


def programs_for(settings: Settings, local_worker: bool, n_page_workers: int = 0) -> tuple[Program, ...]:
    """The processes of these settings, in the order in which people name them.

    n_page_workers: so many of the page workers that they name are started on this machine, too.
    """
    gateway = replace(GATEWAY, drain_s=settings.gateway.drain_s)
    programs = [gateway, MAC, BROKER]
    if settings.host.split == "on":
        programs += [BRIDGE, WORKER] if local_worker else [BRIDGE]
    further = page_worker_places(settings.bridge.page_workers)
    programs += [_numbered(BRIDGE, number, str(number)) for number in range(1, 1 + len(further))]
    return (*programs, *page_workers_of(settings, n_page_workers))


def page_workers_of(settings: Settings, n: int) -> tuple[Program, ...]:
    """The first n of the page workers that the settings name, to be started on this machine."""
    places = page_worker_places(settings.bridge.page_workers)[:n]
    return tuple(_page_worker(number, place.control_port) for number, place in enumerate(places, 1))


def _page_worker(number: int, control_port: int) -> Program:
    flags = ("--pages-only", "--host", LOOPBACK, "--port", "0", "--pages-port", "0")
    program = _numbered(WORKER, number, *flags, "--control-port", str(control_port))
    return replace(program, control_port=control_port)


def _numbered(program: Program, number: int, *arguments: str) -> Program:
    """One more process of a program."""
    name = process_name(program.name, number)
    return replace(program, name=name, command=(*program.command, *arguments))


def with_page_workers_here(settings: Settings, control_ports: Sequence[int]) -> Settings:
    """`settings` that name page workers on this machine, one for each control port."""
    places = ",".join(str(PageWorkerPlace(LOOPBACK, port)) for port in control_ports)
    return structs.replace(settings, bridge=structs.replace(settings.bridge, page_workers=places))


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

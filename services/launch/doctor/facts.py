"""What a doctor found out. Plain values: what is here may be shown to anybody, as the profile is.

None or an empty string is "could not be found out". Used by everything in services.launch.doctor.
"""

from __future__ import annotations

import msgspec


class Machine(msgspec.Struct, frozen=True):
    """The host. gpu_wired_limit_mb: what a Mac's GPU may hold; 0 there is the system's own choice."""

    system: str
    architecture: str
    processor: str
    n_cores: int
    memory_mb: int
    memory_free_mb: int
    python: str
    gpu_wired_limit_mb: int | None = None


class Model(msgspec.Struct, frozen=True):
    """The model that is set, or why it cannot be used. Fingerprints are of contents, shortened."""

    problem: str = ""
    arch: str = ""
    n_layer: int = 0
    file_mb: int = 0
    split_layer: int = 0
    tail_fingerprint: str = ""
    """Of layers [split_layer, n)."""


class Interface(msgspec.Struct, frozen=True):
    """A network interface that may be a cable; its name is left out."""

    on_usb: bool
    speed_mbit: int | None


class Cable(msgspec.Struct, frozen=True):
    """The way to the worker. Rates are of full chunks, hashed, one way."""

    interfaces: tuple[Interface, ...] = ()
    loopback: bool = False
    round_trip_us: float | None = None
    bandwidth_mb_s: float | None = None
    why_not_measured: str = ""


class FarEnd(msgspec.Struct, frozen=True):
    """The worker. `greeting` is empty when it took ours: then protocol version and tail fit."""

    expected: bool
    reachable: bool = False
    why_not: str = ""
    machine: str = ""
    state: str = ""
    memory_mb: int | None = None
    memory_free_mb: int | None = None
    thermal: int | None = None
    control_us: float | None = None
    pages: str = ""
    """Whether it holds pages: "on", "off", or "closed" when the port it names takes no connection."""
    greeted: bool = False
    greeting: str = ""


class Port(msgspec.Struct, frozen=True):
    """One port of ours that is taken by another; only such ports are listed."""

    port: int
    purpose: str
    variable: str
    reason: str
    holder: str = ""


class Journal(msgspec.Struct, frozen=True):
    """Where old keys and values go. `holds`: the context is longer than what stays in the host's memory."""

    holds: bool = False
    limit_tokens: int = 0
    n_ctx: int = 0
    conversation_mb: int = 0
    """Of one conversation of n_ctx tokens; 0: the model could not be read."""
    cap_mb: int = 0
    on_disk_mb: int = 0
    problem: str = ""


class Facts(msgspec.Struct, frozen=True):
    """Everything."""

    version: str
    machine: Machine
    model: Model
    cable: Cable
    worker: FarEnd
    ports: tuple[Port, ...]
    runs: bool
    """A launch runs in our run directory, so its ports are taken by itself."""
    disk_free_mb: int | None
    journal_mb: int
    split_decode: bool = False
    journal: Journal = Journal()

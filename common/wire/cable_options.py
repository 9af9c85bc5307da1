"""Socket options of both ends of the cable: no delay, wide buffers where the system grants them, a quick end.

A table and one question to the system; the caller owns the socket and hands in the module `socket`, because nothing in
common opens one. Used by device.link_server and services.bridge.cable.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

from common.limits import SOCKET_BUFFER_BYTES

ALWAYS = (
    ("IPPROTO_TCP", "TCP_NODELAY", 1),
    ("SOL_SOCKET", "SO_KEEPALIVE", 1),
    ("IPPROTO_TCP", "TCP_KEEPIDLE", 5),
    ("IPPROTO_TCP", "TCP_KEEPINTVL", 2),
    ("IPPROTO_TCP", "TCP_KEEPCNT", 5),
    ("IPPROTO_TCP", "TCP_USER_TIMEOUT", 20_000),
)
WIDE = (("SOL_SOCKET", "SO_SNDBUF", SOCKET_BUFFER_BYTES), ("SOL_SOCKET", "SO_RCVBUF", SOCKET_BUFFER_BYTES))


def cable_options(sockets: ModuleType) -> list[tuple[int, int, int]]:
    """(level, option, value) for setsockopt, of the options that this system has. `sockets` is the module socket."""
    wanted = ALWAYS + (WIDE if buffers_may_grow() else ())
    return [
        (getattr(sockets, level), getattr(sockets, option), value)
        for level, option, value in wanted
        if hasattr(sockets, option)
    ]


def buffers_may_grow() -> bool:
    """Whether asking for a wide buffer gives one. On Linux a request over net.core.*mem_max is cut *and* ends the
    kernel's own growth, which reaches further: then it is better not to ask."""
    if sys.platform != "linux":
        return True
    limits = [Path(f"/proc/sys/net/core/{name}") for name in ("wmem_max", "rmem_max")]
    return all(path.exists() and int(path.read_text()) >= SOCKET_BUFFER_BYTES for path in limits)

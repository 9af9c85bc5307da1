"""What a set link really does on this machine: measured by plain TCP over loopback, through the emulated socket.

The machine has a round trip of its own and sleeps too long by some tens of microseconds, so the delay to add is
found by measuring, and what was reached is told instead of what was asked. Called by device.emulator.stand_in.
"""

from __future__ import annotations

import socket
import threading
import time
from dataclasses import dataclass, replace

from common.wire.frames import HEADER, RESIDUAL
from common.wire.stream import STAGING_BYTES
from device.emulator.gate import FaultGate
from device.emulator.link import EmulatedSocket, Shape, ThawClock
from device.emulator.profiles import Profile

PINGS, PINGS_S_MAX = 200, 0.4
PING = bytes(HEADER.pack((RESIDUAL.magic, RESIDUAL.types["PING"], 0)))
BULK_S = 0.1
BULK_BYTES = (1 << 20, 64 << 20)
ROUNDS = 3
SHORT_S = 500e-6
QUIET_SHARE = 0.2


@dataclass(frozen=True)
class Achieved:
    """Median round trip of 16 bytes, and bytes a second towards the worker and from it."""

    round_trip_s: float
    bytes_per_s_in: float
    bytes_per_s_out: float

    def __str__(self) -> str:
        return (
            f"{self.round_trip_s * 1e6:.0f} µs round trip, {self.bytes_per_s_in / 1e6:.0f} MB/s in, "
            f"{self.bytes_per_s_out / 1e6:.0f} MB/s out"
        )


def calibrated(profile: Profile) -> tuple[Shape, Achieved | None]:
    """The shape that comes nearest to `profile` here, and what it does. None: nothing is shaped, nothing measured."""
    if not profile.shapes:
        return Shape(), None
    plain = Shape(profile.bytes_per_s, jitter_s=profile.jitter_s)
    added_s = max(0.0, profile.round_trip_s - _error_s(plain, 0.0))
    tried = []
    for _ in range(ROUNDS):
        shape = _delayed(plain, added_s)
        error_s = _error_s(shape, profile.round_trip_s)
        tried.append((abs(error_s), shape))
        added_s = max(0.0, added_s - error_s / 2)
    _, shape = min(tried, key=lambda each: each[0])
    return shape, measure(shape)


def _error_s(shape: Shape, wanted_s: float) -> float:
    """By how much the round trip of `shape` without jitter is too long. Others on the machine can only add to it."""
    return round_trip_s(replace(shape, jitter_s=0.0), QUIET_SHARE) - wanted_s


def _delayed(shape: Shape, added_s: float) -> Shape:
    """Long delays go half each way; a short one is all in one: each sleep costs its own inexactness."""
    if added_s < SHORT_S:
        return replace(shape, delay_in_s=added_s, delay_out_s=0.0)
    return replace(shape, delay_in_s=added_s / 2, delay_out_s=added_s / 2)


def measure(shape: Shape) -> Achieved:
    """What `shape` does on this machine."""
    n_bytes = int(min(max(shape.bytes_per_s * BULK_S, BULK_BYTES[0]), BULK_BYTES[1]))
    return Achieved(
        round_trip_s(shape), bandwidth(shape, n_bytes, inwards=True), bandwidth(shape, n_bytes, inwards=False)
    )


def round_trip_s(shape: Shape, share: float = 0.5) -> float:
    """Round trip of 16 bytes through an emulated far end that echoes; `share` of them are as fast. Default: median."""
    here, there = _connected(shape)
    echo = threading.Thread(target=_echo, args=(there,), daemon=True)
    echo.start()
    took: list[float] = []
    until = time.monotonic() + PINGS_S_MAX
    while len(took) < PINGS and time.monotonic() < until:
        start = time.monotonic()
        here.sendall(PING)
        _drain(here, len(PING))
        took.append(time.monotonic() - start)
    here.close()
    echo.join()
    return sorted(took)[int(share * len(took))]


def bandwidth(shape: Shape, n_bytes: int, *, inwards: bool) -> float:
    """Bytes a second of n_bytes in one go, towards the emulated end or from it."""
    here, there = _connected(shape)
    head = HEADER.pack((RESIDUAL.magic, RESIDUAL.types["PING"], n_bytes))
    data = memoryview(head + bytes(n_bytes))
    start = time.monotonic()
    if inwards:
        sender = threading.Thread(target=here.sendall, args=(data,), daemon=True)
        sender.start()
        _drain(there, len(data))
    else:
        sender = threading.Thread(target=lambda: there.sendmsg([data]), daemon=True)
        sender.start()
        _drain(here, len(data))
    took_s = time.monotonic() - start
    sender.join()
    here.close()
    there.close()
    return n_bytes / took_s


def _connected(shape: Shape) -> tuple[socket.socket, EmulatedSocket]:
    with socket.create_server(("127.0.0.1", 0)) as door:
        here = socket.create_connection(door.getsockname())
        there, _ = door.accept()
    for sock in (here, there):
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return here, EmulatedSocket(there, shape, FaultGate(lambda _fault: None), ThawClock(), seed=0)


def _echo(sock: EmulatedSocket) -> None:
    buffer = memoryview(bytearray(STAGING_BYTES))
    try:
        while n := sock.recv_into(buffer):
            sock.sendmsg([memoryview(bytes(buffer[:n]))])
    finally:
        sock.close()


def _drain(sock: socket.socket | EmulatedSocket, n_bytes: int) -> None:
    buffer = memoryview(bytearray(1 << 20))
    while n_bytes > 0 and (n := sock.recv_into(buffer)):
        n_bytes -= n

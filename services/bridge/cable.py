"""One connection to a port of the worker's, from connect to its end; non-blocking, one thread.

Bytes and time in, frames out: `turn` does what the socket allows now and returns what arrived. All that goes wrong is
raised as an OutriggerError that says what happened; the owner (services.bridge.pump; page_pump for the attention
channel) then throws the cable away. Knows nothing of the bus, and opens no payload.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Callable
from typing import Any

from common.errors import LinkDeadlineError, LinkDownError, OutriggerError
from common.metrics import Metrics
from common.wire.cable_options import cable_options
from common.wire.deadlines import AckClock
from common.wire.frames import HEADER, Frame
from common.wire.link import Arrived, Link, Pending, Refused, Role
from common.wire.stream import FrameReader, FrameWriter
from services.bridge.translate import BYTE_KINDS, byte_kind

CONNECT_S_MAX = 3.0
RECV_TURNS_MAX = 64
"""Reads from the socket before the thread looks at the bus again."""


class Cable:
    """A connection to `address`, a (host, port). `link` is its protocol state; `connected` once TCP is up."""

    def __init__(
        self,
        address: tuple[str, int],
        metrics: Metrics,
        now: float,
        clock: AckClock | None = None,
        *,
        make_link: Callable[..., Link] = Link,
        kind_of: Callable[[int], str] = byte_kind,
    ) -> None:
        """make_link: the channel's. kind_of: what the bytes of a frame type are counted as."""
        self.link = make_link(Role.HOST, clock=clock)
        self._kind_of = kind_of
        self.connected = False
        self.last_heard = now
        self._failure: OutriggerError | None = None
        """What ended this connection, told once everything that came before it was taken."""
        self._deaf = False
        self._address = f"{address[0]}:{address[1]}"
        self._count = {
            (direction, kind): metrics.adder("link_bytes_total", direction=direction, kind=kind)
            for direction in ("in", "out")
            for kind in BYTE_KINDS
        }
        self._connect_by = now + CONNECT_S_MAX
        self._reader = FrameReader(self.link.channel.magic, self.link.bytes_max)
        self._writer = FrameWriter()
        self._sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
        self._sock.setblocking(False)
        for level, option, value in cable_options(socket):
            self._sock.setsockopt(level, option, value)
        try:
            code = self._sock.connect_ex(address)
        except OSError as error:  # a name that does not resolve
            self._sock.close()
            raise LinkDownError(f"cannot find the worker's address {address[0]}: {error.strerror}") from error
        if code not in (0, errno.EINPROGRESS):
            self._sock.close()
            raise self._cannot_connect(os.strerror(code))

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether the thread should wake when the socket can be written."""
        return not self.connected or bool(self._writer)

    def due_at(self) -> float | None:
        """When `check` would next find fault."""
        if self._failure is not None:
            return 0.0
        return self.link.due_at() if self.connected else self._connect_by

    def check(self, now: float) -> None:
        """Raise what went wrong when all was received, or LinkDeadlineError when something is overdue."""
        if self._failure is not None:
            raise self._failure
        if not self.connected:
            if now > self._connect_by:
                raise self._cannot_connect(f"no answer within {CONNECT_S_MAX:g} s")
            return
        oldest = self.link.pending[0] if self.link.pending else None
        if oldest is not None and now > oldest.due_at:
            raise LinkDeadlineError(
                f"the worker did not answer {oldest.request.NAME} within {oldest.due_at - oldest.sent_at:.1f} s"
            )

    def send(self, frame: Frame, now: float, *, epoch: int = 0, tag: Any = None) -> None:
        """Queue a frame and send what the socket takes; `check` tells when it is broken. Raises LocalProtocolError."""
        buffers = self.link.send(frame, now, epoch=epoch, tag=tag)
        n_bytes = sum(map(len, buffers))
        self._writer.add(buffers)
        self._flush()
        self._count["out", self._kind_of(frame.TYPE)](n_bytes)

    def turn(self, now: float) -> list[Arrived]:
        """Send and receive what is possible now; the frames that arrived, in order. Raises LinkError when none did."""
        if not self.connected:
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                raise self._cannot_connect(os.strerror(code))
            try:
                self._sock.getpeername()
            except OSError:
                return []  # still connecting
            self.connected = True
        self._flush()
        if self._deaf:
            assert self._failure is not None, "it became deaf by a failure"
            raise self._failure
        return self._receive(now)

    def _cannot_connect(self, why: str) -> LinkDownError:
        return LinkDownError(
            f"cannot connect to the worker at {self._address}: {why}; is `outrigger worker` running?"
        )

    def _flush(self) -> None:
        if not self._writer.n_bytes:
            return
        try:
            while self._writer and self.connected and self._failure is None:
                self._writer.advance(self._sock.sendmsg(self._writer.buffers()))
        except BlockingIOError:
            return
        except OSError as error:
            # What the worker said before it closed may still be readable, and says more than "broken pipe".
            self._failure = self._broke(error)

    def _receive(self, now: float) -> list[Arrived]:
        """The frames that arrived. What came whole counts, whatever is wrong behind it; `check` tells that."""
        arrived: list[Arrived] = []
        try:
            for _ in range(RECV_TURNS_MAX):
                if not self._receive_once(now, arrived):
                    break
        except OutriggerError as error:
            self._deaf = True
            self._failure = self._failure or error
            if not arrived:
                raise self._failure from error
        return arrived

    def _receive_once(self, now: float, arrived: list[Arrived]) -> bool:
        """Receive what fits the buffer, add the frames to `arrived`; whether there may be more."""
        buffer = self._reader.buffer()
        try:
            n = self._sock.recv_into(buffer)
        except BlockingIOError:
            return False
        except OSError as error:
            raise self._broke(error) from error
        if n == 0:
            raise LinkDownError(f"the worker at {self._address} closed the link")
        self.last_heard = now
        for raw in self._reader.advance(n):
            self._count["in", self._kind_of(raw.type)](HEADER.size + len(raw.payload))
            event = self.link.receive(raw, now)
            if isinstance(event, Arrived):
                arrived.append(event)
            elif isinstance(event, Refused):
                raise event.error
        return n == len(buffer)

    def _broke(self, error: OSError) -> LinkDownError:
        return LinkDownError(f"the link to {self._address} broke: {error.strerror or error}")

    def abandon(self) -> list[Pending]:
        """Close the connection. Returns the requests that will not be answered, oldest first."""
        self._sock.close()
        pending = list(self.link.pending)
        self.link.pending.clear()
        return pending

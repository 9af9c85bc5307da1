"""One connection of a binary channel: a socket, its Link, and the thread that reads it.

Which channel it is, the link says. Reading and sending may run on different threads, so the link's state is behind one
lock and the order of frames on the socket behind another: a long answer being sent never keeps the reader from
reading, which is what lets the other side finish sending. Knows no tensors. Made by device.link_server.
"""

from __future__ import annotations

import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from common.errors import LocalProtocolError, OutriggerError, RemoteProtocolError
from common.log import get_log
from common.wire.frames import Frame
from common.wire.grammar import Phase, Role, Rules
from common.wire.layout import Payload
from common.wire.link import Arrived, Link, Refused
from common.wire.stream import SEND_BUFFERS_MAX, FrameReader, FrameWriter
from device.compute import Work

log = get_log()

SEND_S_MAX = 30.0
"""A client that takes no byte for so long is given up."""
GREETING_S_MAX = 10.0
PING_DATA = b"still there?"
LOOK_S = 0.01


class SessionSocket(Protocol):
    """The part of a connected socket that a session uses; the emulator has another one that does all this."""

    def settimeout(self, timeout_s: float | None, /) -> None: ...

    def setsockopt(self, level: int, option: int, value: bytes, /) -> None: ...

    def recv_into(self, buffer: memoryview, n_bytes: int, flags: int, /) -> int: ...

    def sendmsg(self, buffers: list[memoryview], /) -> int: ...

    def shutdown(self, how: int, /) -> None: ...

    def close(self) -> None: ...


class Session:
    """A client, from its first byte to its last. `serve` runs on the connection's own thread.

    on_greeting is called with the session when a well-formed greeting came, before it is answered; it raises
    WorkerBusyError when another client keeps the place. on_work takes everything that needs the engine.
    """

    def __init__(
        self,
        sock: SessionSocket,
        peer: str,
        *,
        link: Link,
        on_greeting: Callable[[Session], None],
        on_work: Callable[[Work], None],
    ) -> None:
        self.peer = peer
        self.closed = False
        self.close_reason = ""
        self.last_heard = self._opened_at = time.monotonic()
        self._greeted = False
        self._sock = sock
        self._link, self._rules = link, link.rules
        self._greetings = greetings_of(link.rules)
        self._own = frozenset((link.rules.bye, *link.rules.ping, *self._greetings))
        """Frames that concern the connection itself"""
        self._state_lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._pong = threading.Event()
        self._on_greeting = on_greeting
        self._on_work = on_work

    # --- reading

    def serve(self) -> None:
        """Read until the client leaves or breaks the protocol. Never raises."""
        reader = FrameReader(self._link.channel.magic, self._link.bytes_max)
        try:
            while not self.closed and (n := self._receive(reader)):
                for raw in reader.advance(n):
                    now = self.last_heard = time.monotonic()
                    with self._state_lock:
                        event = self._link.receive(raw, now)
                    if event is not None:
                        self._take(event, now)
            self.close(self.close_reason or "the client closed")
        except OutriggerError as error:
            self.fail(error, 0)
        except TimeoutError:
            self.close(f"no greeting within {GREETING_S_MAX:g} s")
        except OSError as error:
            self.close(f"the connection broke: {error}")

    def _receive(self, reader: FrameReader) -> int:
        """Bytes that came; 0 at the end. Until the greeting is whole, all of it must come within GREETING_S_MAX."""
        if self._greeted:
            # Within a long payload one waits for a whole piece: fewer turns taken from the compute thread.
            return self._sock.recv_into(reader.buffer(), 0, socket.MSG_WAITALL if reader.in_payload else 0)
        left_s = self._opened_at + GREETING_S_MAX - time.monotonic()
        self._sock.settimeout(max(left_s, 0.001))
        return self._sock.recv_into(reader.buffer(), 0, 0)

    def _take(self, event: Arrived | Refused, now: float) -> None:
        if isinstance(event, Refused):
            self._on_work(Work(self, event, event.seq, now))
            return
        frame, ping = event.frame, self._rules.ping
        if type(frame) not in self._own:
            self._on_work(Work(self, frame, event.seq, now))
        elif isinstance(frame, self._rules.bye):
            self.close("the client said goodbye")
        elif isinstance(frame, ping[:1]):
            self.reply(ping[1](Payload(bytes(frame.reply_len))))  # type: ignore[attr-defined,call-arg]
        elif isinstance(frame, ping[1:]):
            self._pong.set()
        else:
            self._on_greeting(self)
            self._greeted = True
            self._sock.settimeout(None)  # a plain blocking socket: no poll before each call
            self._sock.setsockopt(
                socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(SEND_S_MAX), 0)
            )
            self._on_work(Work(self, frame, 0, now))

    # --- sending

    def reply(self, frame: Frame) -> None:
        """Send one frame whole. A client that is gone or stuck closes the session; nothing is raised for that."""
        try:
            self._say(frame)
        except LocalProtocolError as error:
            if not self.closed:
                log.error("answer could not be sent", peer=self.peer, frame=frame.NAME, error=str(error))
                self.close(str(error))

    def fail(self, error: OutriggerError, n_valid: int) -> None:
        """Say what is wrong, once, and close."""
        with self._send_lock:
            if self.closed:
                return
            with self._state_lock:
                buffers = self._link.farewell(error, n_valid)
            self._sock.settimeout(1.0)
            self._send(buffers)
            self.close(str(error), worth_a_warning=isinstance(error, RemoteProtocolError))

    def _say(self, frame: Frame) -> None:
        with self._send_lock:
            with self._state_lock:
                buffers = self._link.send(frame, time.monotonic())
            self._send(buffers)

    def _send(self, buffers: list[memoryview]) -> None:
        try:
            sent = self._sock.sendmsg(buffers[:SEND_BUFFERS_MAX])
            if sent == sum(map(len, buffers)):
                return  # most answers are short and leave at once
            writer = FrameWriter()
            writer.add(buffers)
            writer.advance(sent)
            while writer:
                writer.advance(self._sock.sendmsg(writer.buffers()))
        except OSError as error:
            self.close(f"sending failed: {error}")

    # --- life

    def answers(self, wait_s: float) -> bool:
        """Whether the client is alive: it answers a PING within wait_s, or its requests take longer than that."""
        if self._link.phase is not Phase.EXTENDED or not self._rules.ping:
            # Not greeted whole, or one who answers no PING: it was heard of lately, or waits for us.
            lately = time.monotonic() - self.last_heard < GREETING_S_MAX
            return not self.closed and (lately or bool(self._link.pending))
        give_up_at = time.monotonic() + wait_s
        self._pong.clear()
        pinged = False
        while not self.closed and time.monotonic() < give_up_at:
            if not pinged:
                pinged = self._ping()
            if self._pong.wait(LOOK_S) and not self.closed:
                return True
        return not self.closed and not pinged

    def _ping(self) -> bool:
        """Send a PING if nothing is unanswered now."""
        if not self._link.idle:
            return False
        try:
            self._say(self._rules.ping[0](0, Payload(PING_DATA)))  # type: ignore[call-arg]
        except LocalProtocolError:
            return False  # a request came meanwhile
        return True

    def close(self, reason: str, *, worth_a_warning: bool = False) -> None:
        """End the connection from any thread; the reader's thread then returns from `serve`."""
        if self.closed:
            return
        self.closed, self.close_reason = True, reason
        (log.warning if worth_a_warning else log.info)("client left", peer=self.peer, reason=reason)
        with suppress(OSError):  # it may not be connected any more
            self._sock.shutdown(socket.SHUT_RDWR)

    def dispose(self) -> None:
        """Free the descriptor, once `serve` has returned."""
        self.close("disposed")
        with self._send_lock:
            self._sock.close()


def greetings_of(rules: Rules) -> tuple[type[Frame], ...]:
    """The frames by which a client may open a connection."""
    return tuple(cls for who, cls in rules.grammar[Phase.OPEN] if who is Role.HOST)

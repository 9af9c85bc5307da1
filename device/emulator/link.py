"""The worker's socket on an emulated link: the same calls, with bytes that arrive when they would, and faults in them.

`EmulatedSocket` stands where device.session expects a connected socket. What comes from the host is held back in
recv_into, on the reader's thread; what goes to it leaves from a thread of its own, so that computing goes on while
bytes are under way, as it does with a real network card. All waiting is sleeping.
"""

from __future__ import annotations

import random
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

from common.limits import SOCKET_BUFFER_BYTES
from common.wire.frames import ATTENTION, RESIDUAL, Channel
from common.wire.stream import FrameWriter
from device.emulator.faults import FRAMES, PAGE_FRAMES, Fault
from device.emulator.gate import FaultGate
from device.emulator.pace import Pace
from device.emulator.tracker import FrameTracker

PIECE_BYTES = 256 * 1024
"""A paced direction moves in pieces of at most this, so that a long frame trickles as it would."""
AT_ONCE_BYTES = 4096
"""So few bytes leave at once where nothing waits and no delay is set: another thread would delay them more."""
SLEEP_S_MIN = 20e-6
"""Shorter waits are not worth the system's rounding of them."""
RESET = struct.pack("ii", 1, 0)  # SO_LINGER with no time: close sends a reset


@dataclass(frozen=True, eq=False)
class Words:
    """A channel's frames by the words of fault scripts. `pong` answers a PING out of turn, where there is one;
    `no_answers` are said by a worker and answer nothing."""

    frame_of: dict[int, str]
    pong: int | None
    no_answers: tuple[int, ...]

    @classmethod
    def of(cls, channel: Channel, frames: dict[str, tuple[str, ...]]) -> Words:
        types, pong = channel.types, channel.types.get("PONG")
        frame_of = {types[name]: word for word, names in frames.items() for name in names}
        return cls(frame_of, pong, (types["BYE"], *(() if pong is None else (types["PING"],))))


RESIDUAL_WORDS, PAGE_WORDS = Words.of(RESIDUAL, FRAMES), Words.of(ATTENTION, PAGE_FRAMES)
FRAME_OF = RESIDUAL_WORDS.frame_of


@dataclass(frozen=True)
class Shape:
    """What both directions of a link do. Delays are what this machine must add, see device.emulator.achieved."""

    bytes_per_s: float = 0.0
    delay_in_s: float = 0.0
    delay_out_s: float = 0.0
    jitter_s: float = 0.0


class EmulatedSocket:
    """Wraps a connected TCP socket for one session. Made by StandIn.wrap."""

    def __init__(
        self,
        sock: socket.socket,
        shape: Shape,
        gate: FaultGate,
        thaw: ThawClock,
        seed: int,
        words: Words = RESIDUAL_WORDS,
    ) -> None:
        self._sock, self._gate, self._thaw, self._words = sock, gate, thaw, words
        self._rng = random.Random(seed)
        self._paced_in = bool(shape.bytes_per_s or shape.delay_in_s or shape.jitter_s)
        self._in = Pace(shape.bytes_per_s, shape.delay_in_s, shape.jitter_s, self._rng)
        self._out = Pace(shape.bytes_per_s, shape.delay_out_s, shape.jitter_s, self._rng)
        self._came, self._left = FrameTracker(), FrameTracker()
        self._asked: deque[str] = deque()  # frames whose answers are still to be sent
        self._sent_at, self._drained = (
            0.0,
            True,
        )  # of the bytes that came last; whether more were waiting then
        self._reset = False
        self._flips = 0  # to be done in the next bytes that leave
        self._sender: _Sender | None = None
        if shape.bytes_per_s or shape.delay_out_s or shape.jitter_s:
            self._sender = _Sender(self)

    # --- what a session calls

    def settimeout(self, timeout_s: float | None) -> None:
        self._sock.settimeout(timeout_s)

    def setsockopt(self, *arguments: int | bytes) -> None:
        self._sock.setsockopt(*arguments)  # type: ignore[arg-type]

    def recv_into(self, buffer: memoryview, n_bytes: int = 0, flags: int = 0) -> int:
        """As a socket's; returns once the bytes would have arrived."""
        if self._paced_in:
            n = self._receive(buffer[:PIECE_BYTES])
        else:
            n = self._sock.recv_into(buffer, n_bytes, flags)
        self._thaw.wait()
        if self._reset:
            raise ConnectionResetError("the emulated cable was cut")
        view = buffer[:n]
        for passing in self._came.feed(view):
            frame = self._words.frame_of.get(passing.type)
            if frame is None:
                continue
            if passing.event == "began":
                self._strike("before", frame)
            elif passing.event == "half":
                for _ in self._strike("in", frame):
                    flip_bit(view, passing.first, passing.at, self._rng)
            elif frame != "ping":
                self._asked.append(frame)
        return n

    def sendmsg(self, buffers: list[memoryview]) -> int:
        """As a socket's, and takes everything; what goes wrong with it later is told by the next call."""
        n_bytes = sum(len(buffer) for buffer in buffers)
        if self._sender is None or (n_bytes <= AT_ONCE_BYTES and self._sender.idle and not self._out.delay_s):
            self.transmit(buffers)
        else:
            self._sender.put(buffers, n_bytes)
        return n_bytes

    def shutdown(self, how: int) -> None:
        """End both directions, once what was sent before has left."""
        if self._sender is not None:
            self._sender.end()
        if not self._reset:  # a reset connection says no goodbye
            self._sock.shutdown(how)

    def close(self) -> None:
        if self._sender is not None:
            self._sender.end()
        self._sock.close()

    # --- what the emulator calls

    def reset(self) -> None:
        """The connection breaks at once, in the middle of whatever moves: the host sees a reset."""
        self._reset = True
        if self._sender is not None:
            self._sender.drop()
        with suppress(OSError):  # it may have ended by itself
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            self._sock.shutdown(socket.SHUT_RD)  # wakes the reader, who closes; that sends the reset

    def transmit(self, buffers: Sequence[memoryview]) -> None:
        """Put bytes on the real socket now, stopping where a fault strikes."""
        self._thaw.wait()
        stopping = self._gate.waits_for("answering", "after")
        ready: list[memoryview] = []
        for buffer in buffers:
            done = 0
            for at, moment, frame in self._answered(buffer):
                if stopping:
                    self._put([*ready, buffer[done:at]])
                    ready, done = [], at
                    self._flips += len(self._strike(moment, frame))
            ready.append(buffer[done:])
        self._put(ready)

    def pieces(
        self, buffers: Sequence[memoryview], sent_at: float
    ) -> Iterator[tuple[float, list[memoryview]]]:
        """(when it is due at the host, bytes), in order."""
        if not self._out.bytes_per_s:
            whole = list(buffers)
            yield self._out.arrival(sent_at, sum(map(len, whole))), whole
            return
        burst = True
        for buffer in buffers:
            for at in range(0, len(buffer), PIECE_BYTES):
                piece = buffer[at : at + PIECE_BYTES]
                yield self._out.arrival(sent_at, len(piece), burst=burst), [piece]
                burst = False

    # --- inside

    def _receive(self, buffer: memoryview) -> int:
        waited = True
        try:
            n = self._sock.recv_into(buffer, 0, socket.MSG_DONTWAIT)
            waited = False  # it was there already, sent while the bytes before it were held back
        except BlockingIOError:
            n = self._sock.recv_into(buffer)
        fresh = waited or self._drained
        if fresh:
            self._sent_at = time.monotonic()
        self._drained = n < len(buffer)
        if n:
            sleep_until(self._in.arrival(self._sent_at, n, burst=fresh))
        return n

    def _strike(self, moment: str, frame: str) -> list[Fault]:
        flips = self._gate.moment(moment, frame)
        if self._reset:
            raise ConnectionResetError("the emulated cable was cut")
        self._thaw.wait()
        return flips

    def _answered(self, buffer: memoryview) -> Iterator[tuple[int, str, str]]:
        """(place, moment, frame asked) of the answers that are half or wholly sent with these bytes."""
        for passing in self._left.feed(buffer):
            if passing.event == "began" or passing.type in self._words.no_answers:
                continue
            pong = passing.type == self._words.pong
            frame = "ping" if pong else self._asked[0] if self._asked else ""
            if passing.event == "ended" and not pong and self._asked:
                self._asked.popleft()
            yield passing.at, "answering" if passing.event == "half" else "after", frame

    def _put(self, buffers: list[memoryview]) -> None:
        if self._flips:
            buffers, self._flips = [flipped(memoryview(b"".join(buffers)))], 0
        writer = FrameWriter()
        writer.add(buffers)
        if self._reset:
            raise ConnectionResetError("the emulated cable was cut")
        while writer:
            writer.advance(self._sock.sendmsg(writer.buffers()))


class ThawClock:
    """Until when everything stands still. `wait` sleeps till then."""

    def __init__(self) -> None:
        self.until = 0.0

    def freeze(self, seconds: float) -> None:
        self.until = max(self.until, time.monotonic() + seconds)

    def wait(self) -> None:
        while (left_s := self.until - time.monotonic()) > 0:
            time.sleep(min(left_s, 0.05))


class _Sender(threading.Thread):
    """Sends what is due, in order. Bounded as a system's socket buffer is: `put` waits while it is full."""

    def __init__(self, owner: EmulatedSocket) -> None:
        super().__init__(name="emulated cable", daemon=True)
        self._owner = owner
        self._waiting: deque[tuple[float, list[memoryview]]] = deque()
        self._n_bytes = 0
        self._ending = False
        self._error: OSError | None = None
        self._changed = threading.Condition()
        self.start()

    @property
    def idle(self) -> bool:
        return not self._waiting

    def put(self, buffers: list[memoryview], n_bytes: int) -> None:
        """Queue bytes; raises what sending earlier ones met."""
        with self._changed:
            while self._n_bytes > SOCKET_BUFFER_BYTES and not self._ending and self._error is None:
                self._changed.wait()
            if self._error is not None:
                raise self._error
            if self._ending:
                raise BrokenPipeError("the socket was shut down")
            self._waiting.append((time.monotonic(), buffers))
            self._n_bytes += n_bytes
            self._changed.notify_all()

    def end(self) -> None:
        """Send what waits, then no more."""
        with self._changed:
            self._ending = True
            self._changed.notify_all()
        if threading.current_thread() is not self:
            self.join()

    def drop(self) -> None:
        """Send nothing more."""
        with self._changed:
            self._waiting.clear()
            self._n_bytes, self._ending = 0, True
            self._changed.notify_all()

    def run(self) -> None:
        while True:
            with self._changed:
                while not self._waiting and not self._ending:
                    self._changed.wait()
                if not self._waiting:
                    return
                sent_at, buffers = self._waiting[0]
            try:
                for due_at, piece in self._owner.pieces(buffers, sent_at):
                    sleep_until(due_at)
                    self._owner.transmit(piece)
            except OSError as error:
                with self._changed:
                    self._error = error
                    self._waiting.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                if self._waiting:
                    self._waiting.popleft()
                    self._n_bytes -= sum(map(len, buffers))
                self._changed.notify_all()


def sleep_until(at: float) -> None:
    left_s = at - time.monotonic()
    if left_s > SLEEP_S_MIN:
        time.sleep(left_s)


def flip_bit(view: memoryview, first: int, stop: int, rng: random.Random) -> None:
    """Change one bit of view[first:stop]."""
    if stop > first:
        view[rng.randrange(first, stop)] ^= 1 << rng.randrange(8)


def flipped(view: memoryview) -> memoryview:
    """A copy with its lowest bit changed."""
    copy = bytearray(view)
    if copy:
        copy[0] ^= 1
    return memoryview(copy)

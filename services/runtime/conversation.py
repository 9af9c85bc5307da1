"""One end of a route without its socket: identity, epochs, sequence numbers, and what is told when they do not fit.

Frames in, `Received` or nothing out. Every message carries the epoch of its sender (a new number for each life of a
channel) and a sequence number counted per direction and peer. From these two a receiver knows, and tells as a
`BusEvent`, that a peer is new, that it was restarted, that messages of its earlier life still arrive (dropped), or
that some were lost on the way. Knows no ZeroMQ: services.runtime.bus, the only caller, owns the sockets.
"""

from __future__ import annotations

import functools
import itertools
import re
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from common.errors import LocalProtocolError, RemoteProtocolError
from common.wire.codec import Buffer, BusCodec, Side
from common.wire.messages import Message
from common.wire.routes import Route

EPOCHS_REMEMBERED = 16
"""Ended lives of a peer whose late messages are recognised."""
NAME = re.compile(r"[a-z0-9_.]{1,64}")

EventKind = Literal["joined", "restarted", "lost_peer", "stale", "replayed", "foreign", "gap"]
DROP_REASONS = ("stale", "replayed", "foreign", "lost")
"""Label values of outrigger_bus_dropped_total."""


@dataclass(frozen=True, slots=True)
class BusEvent:
    """Something a channel noticed about a peer.

    joined (first message of a peer), restarted (its next life began), lost_peer (the connection went down),
    stale (a message of an earlier life was dropped), replayed (a number was seen again, dropped), foreign (not a
    message of this route, dropped), gap (`count` messages never arrived).
    """

    kind: EventKind
    route: str
    peer: str
    detail: str = ""
    count: int = 1


@dataclass(frozen=True, slots=True)
class Received:
    """One message. `frames` are its arrays, as views into received memory: np.frombuffer(frame, ...) copies nothing."""

    message: Any
    frames: tuple[memoryview, ...]
    peer: bytes
    """Address for a reply (Owner.send(..., to=peer)); empty at the asker."""
    epoch: int
    seq: int
    at_s: float = field(default_factory=time.monotonic, compare=False)
    """When it was taken from the socket, by the monotonic clock."""


@dataclass(slots=True)
class _Inflow:
    """What one peer said so far: its living epoch, the number expected next, the epochs that ended."""

    epoch: int = 0
    expected: int | None = None
    ended: deque[int] = field(default_factory=lambda: deque(maxlen=EPOCHS_REMEMBERED))


_last_epoch = itertools.count()


def new_epoch() -> int:
    """A number no earlier life of any channel had: nanoseconds since 1970, told apart within one process."""
    return time.time_ns() + next(_last_epoch) % 1000


class Conversation:
    """The state of one channel's end. `name` is the process that speaks; askers are told apart by name and epoch.

    Two living askers of one name on one route are not two peers but a restart: the newest wins.
    """

    def __init__(
        self,
        route: Route,
        side: Side,
        *,
        name: str,
        epoch: int | None = None,
        on_event: Callable[[BusEvent], None] | None = None,
    ) -> None:
        if not NAME.fullmatch(name):
            raise LocalProtocolError(f"{name!r} is not a process name: use a-z, 0-9, _ and .")
        self.route = route
        self.side = side
        self.name = name
        self.epoch = new_epoch() if epoch is None else epoch
        self.dropped: Counter[str] = Counter()
        """Messages dropped or lost, by reason (DROP_REASONS)."""
        self._codec = BusCodec(route, side)
        self._on_event = on_event
        self._sent: dict[bytes, int] = {}
        self._inflows: dict[str, _Inflow] = {}

    @property
    def identity(self) -> bytes:
        """The address an owner answers to: one for each life."""
        return f"{self.name}-{self.epoch:x}".encode()

    def pack(self, message: Message, arrays: Sequence[Any], peer: bytes = b"") -> list[Buffer]:
        """Frames of the next message to `peer`. Call `sent` once they are on their way: until then nothing changed."""
        return self._codec.encode(message, arrays, epoch=self.epoch, seq=self._sent.get(peer, 0) + 1)

    def sent(self, peer: bytes = b"") -> None:
        """The packed message left: the next one gets the next number."""
        self._sent[peer] = self._sent.get(peer, 0) + 1

    def open(self, frames: Sequence[Any], peer: bytes = b"") -> Received | None:
        """The message in `frames`, or None when it must not be used (counted and told)."""
        who = peer_name(peer) if self.side == "owner" else self.route.owner
        try:
            envelope = self._codec.decode(frames)
        except RemoteProtocolError as error:
            self._drop("foreign", who, str(error))
            return None
        if not self._admit(who, envelope.epoch, envelope.seq):
            return None
        return Received(envelope.message, envelope.arrays, peer, envelope.epoch, envelope.seq)

    def lost_peer(self, detail: str, peer: bytes = b"") -> None:
        """The socket says that the other end went away."""
        if self.side == "owner":
            self._sent.pop(peer, None)
        self._tell("lost_peer", peer_name(peer) if peer else self.route.owner, detail)

    def refused(self, detail: str) -> None:
        """The socket turned somebody away, or was turned away."""
        self._drop("foreign", "unknown" if self.side == "owner" else self.route.owner, detail)

    def _admit(self, who: str, epoch: int, seq: int) -> bool:
        inflow = self._inflows.get(who) or self._inflows.setdefault(who, _Inflow())
        if epoch != inflow.epoch:
            if epoch in inflow.ended:
                self._drop("stale", who, f"message {seq} of epoch {epoch:x}, which ended")
                return False
            self._begin_epoch(inflow, who, epoch)
        expected = seq if inflow.expected is None else inflow.expected
        if seq < expected:
            self._drop("replayed", who, f"message {seq} again; {expected} was expected")
            return False
        inflow.expected = seq + 1
        if seq > expected:
            self.dropped["lost"] += seq - expected
            self._tell("gap", who, f"messages {expected} to {seq - 1} never arrived", seq - expected)
        return True

    def _begin_epoch(self, inflow: _Inflow, who: str, epoch: int) -> None:
        if inflow.epoch:
            inflow.ended.append(inflow.epoch)
            self._forget_lives_of(who, epoch)
            self._tell("restarted", who, f"epoch {inflow.epoch:x} ended, {epoch:x} began")
        else:
            self._tell("joined", who, f"epoch {epoch:x}")
        inflow.epoch = epoch
        # An owner counts each asker from 1. An asker goes on counting when the owner is restarted, so an owner takes
        # the first number it sees.
        inflow.expected = 1 if self.side == "asker" else None

    def _forget_lives_of(self, who: str, living: int) -> None:
        if self.side == "owner":
            for peer in [p for p in self._sent if peer_name(p) == who and not p.endswith(b"-%x" % living)]:
                del self._sent[peer]

    def _drop(self, kind: Literal["stale", "replayed", "foreign"], who: str, detail: str) -> None:
        self.dropped[kind] += 1
        self._tell(kind, who, detail)

    def _tell(self, kind: EventKind, who: str, detail: str, count: int = 1) -> None:
        if self._on_event is not None:
            self._on_event(BusEvent(kind, self.route.name, who, detail, count))


@functools.lru_cache(256)
def peer_name(identity: bytes) -> str:
    """The process name in an asker's address; for an address we did not give, its bytes as hex."""
    name, dash, _epoch = identity.decode("ascii", "replace").rpartition("-")
    return name if dash and NAME.fullmatch(name) else identity.hex()

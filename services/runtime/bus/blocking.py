"""The blocking forms of a channel, for threads that compute or carry bytes and cannot afford a wake-up too many."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

import zmq

from common.wire.messages import Message
from services.runtime.bus.channel import CONNECT_WAIT_S, Channel
from services.runtime.conversation import Received

NOBLOCK, SNDMORE, POLLIN = int(zmq.NOBLOCK), int(zmq.SNDMORE), int(zmq.POLLIN)
"""Plain numbers: arithmetic with the library's enumerations costs more than sending a frame."""
SHARED_BYTES_MIN = 64 * 1024
"""Frames from this size on are handed over as they are; copying a shorter one costs less."""


class _BlockingChannel(Channel):
    """The thread forms: one thread at a time uses the channel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)
        self._others: Sequence[tuple[Any, int]] = []  # what `wait` was last asked to watch as well
        self._known: dict[Any, Any] = {}  # what the poller calls them -> what the caller does
        self._send_wait_s = -1.0  # what the socket's time to send is set to

    def recv(self, timeout_s: float | None, *, hot_s: float = 0.0) -> Received | None:
        """The next message, or None after `timeout_s` (None: wait for ever; 0: only look).

        For the first `hot_s` seconds the socket is asked again and again without blocking: a thread that is awake
        answers in half the time of one that the kernel must wake.
        """
        if timeout_s == 0:
            return self._try_recv()
        start = time.monotonic()
        if hot_s:
            hot_until = start + (hot_s if timeout_s is None else min(hot_s, timeout_s))
            while time.monotonic() < hot_until:
                if self.has_mail and (received := self._try_recv()) is not None:
                    return received
                os.sched_yield()
        while True:
            if (received := self._try_recv()) is not None:
                return received
            left_s = None if timeout_s is None else start + timeout_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            if self._others:
                self._watch_also([], ())
            self._wait(left_s)

    @property
    def has_mail(self) -> bool:
        """Whether a message is here. Costs half of what it costs to fail to receive one."""
        return bool(int(self._socket.getsockopt(zmq.EVENTS)) & POLLIN)

    def wait(self, timeout_s: float | None, *sockets: Any, writers: Sequence[Any] = ()) -> list[Any]:
        """Those of this channel and `sockets` (channels, or what has a fileno()) that can be read.

        Those of `sockets` that are also in `writers` count as ready when they can be written, too. Empty after
        `timeout_s`.
        """
        wanted = [
            (_polled(other), zmq.POLLIN | zmq.POLLOUT if other in writers else zmq.POLLIN)
            for other in sockets
        ]
        if wanted != self._others:  # they seldom change, and registering costs as much as waiting
            self._watch_also(wanted, sockets)
        return [self._known[item] for item in self._wait(timeout_s)]

    def _watch_also(self, wanted: Sequence[tuple[Any, int]], sockets: Sequence[Any]) -> None:
        for other, _ in self._others:
            self._poller.unregister(other)
        for other, events in wanted:
            self._poller.register(other, events)
        self._others = wanted
        # The poller answers with descriptors for everything that is not a ZeroMQ socket.
        polled = [other._socket if isinstance(other, Channel) else other.fileno() for other in sockets]
        self._known = {self._socket: self, **dict(zip(polled, sockets, strict=True))}

    def close(self) -> None:
        """Close the socket; what was sent has LINGER_MS to leave."""
        if not self._closed:
            self._release()

    def __enter__(self) -> Any:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _wait(self, timeout_s: float | None) -> list[Any]:
        # Rounded up: a poll of 0 ms for the last fraction of a wait would spin.
        timeout_ms = None if timeout_s is None else max(0, int(timeout_s * 1000 + 0.999))
        ready = [item for item, _flags in self._poller.poll(timeout_ms)]
        if self._monitor in ready:
            ready.remove(self._monitor)
            self._noticed(self._monitor.recv_multipart())
        return ready

    def _try_recv(self) -> Received | None:
        """The next usable message that is already here."""
        recv = self._socket.recv
        while True:
            try:
                frames = [recv(NOBLOCK, copy=False)]
            except zmq.Again:
                return None
            while frames[-1].more:  # a message is here whole, or not at all
                frames.append(recv(NOBLOCK, copy=False))
            if (received := self._opened(frames)) is not None:
                return received

    def _send_within(self, message: Message, arrays: Sequence[Any], to: bytes, wait_s: float) -> None:
        *frames, last = self.conversation.pack(message, arrays, to)
        if wait_s != self._send_wait_s:
            self._socket.setsockopt(zmq.SNDTIMEO, int(wait_s * 1000))
            self._send_wait_s = wait_s
        send = self._socket.send
        try:
            if to:
                send(to, SNDMORE)
            for frame in frames:
                send(frame, SNDMORE, copy=len(frame) < SHARED_BYTES_MIN)
            send(last, 0, copy=len(last) < SHARED_BYTES_MIN)
        except zmq.ZMQError as error:
            raise self._unsent(error, to) from error
        self.conversation.sent(to)


def _polled(other: Any) -> Any:
    """What the poller is given for it."""
    return other._socket if isinstance(other, Channel) else other


class BlockingAsker(_BlockingChannel):
    """The connecting end of a route, for a thread."""

    def send(self, message: Message, *arrays: Any, wait_s: float = CONNECT_WAIT_S) -> None:
        """Send to the owner; waits up to `wait_s` for a connection or for room, then raises the route's error."""
        self._send_within(message, arrays, b"", wait_s)

    def losses(self) -> int:
        """How often the connection to the owner went down so far; what was unanswered then stays so."""
        while self._monitor.poll(0):
            self._noticed(self._monitor.recv_multipart())
        return self._n_losses


class BlockingOwner(_BlockingChannel):
    """The binding end of a route, for a thread. `endpoint` holds the real port when 0 was asked for."""

    _type = zmq.ROUTER
    _side = "owner"

    def _attach(self) -> None:
        self._bind()

    def send(self, message: Message, *arrays: Any, to: bytes, wait_s: float = 0.0) -> None:
        """Send to the asker at address `to`. Raises the route's error when it is gone, or stuck for `wait_s`."""
        self._send_within(message, arrays, to, wait_s)

"""Sockets towards programs that are not ours: whole messages of plain frames, no conversation, no header.

    ForeignOwner    ROUTER, binds: takes what any client says, answers each by its address
    ForeignAsker    DEALER, connects: our own client library's end
    Publisher       XPUB, binds: the same to everybody who subscribed
    Listener        SUB, connects: the client library's end of it

What frames mean is decided by common.wire.public and by those who hold these sockets. Nothing here waits to send: a
peer that does not read is told to the sender as PeerStuckError, one that is gone as PeerGoneError.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator

from common.errors import ServiceError
from common.limits import EVENTS_HWM_MESSAGES, PUBLIC_BYTES_MAX, PUBLIC_HWM_MESSAGES
from services.runtime.bus.sockets import bind, configure, demand_keys, present_key
from services.runtime.endpoints import CurveKeys, check_endpoint

SUBSCRIPTION_BYTES_MAX = 256
_CONNECTION_EVENTS = zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED


class PeerGoneError(ServiceError):
    """The other end is not connected any more."""


class PeerStuckError(ServiceError):
    """The other end does not read: as many messages wait for it as may."""


class _Foreign:
    """One socket, its reader task, and what closes them. Made inside a running loop; `async with` it."""

    _type: int
    _hwm = PUBLIC_HWM_MESSAGES
    _frame_bytes_max = PUBLIC_BYTES_MAX

    def __init__(self, endpoint: str, keys: CurveKeys | None) -> None:
        check_endpoint(endpoint, has_keys=keys is not None)
        self.endpoint = endpoint
        self._keys = keys
        self._lock_fd = -1
        self._judge: ThreadAuthenticator | None = None
        self._monitor: Any = None
        self._tasks: list[asyncio.Task[None]] = []
        # With keys a context of its own, because the judge of client keys serves a whole context.
        self._own_context = zmq.Context() if keys else None
        self._context = self._own_context or zmq.Context.instance()
        self._socket: Any = zmq.asyncio.Context.shadow(self._context).socket(self._type)
        try:
            configure(self._socket, hwm=self._hwm, frame_bytes_max=self._frame_bytes_max)
            self._attach()
        except BaseException:
            self._release()
            raise

    def _attach(self) -> None:
        raise NotImplementedError

    def _bind(self) -> None:
        if self._keys:
            self._judge = demand_keys(self._context, self._socket, self._keys, "public")
        self.endpoint, self._lock_fd = bind(self._socket, self.endpoint, "public ZeroMQ endpoint")

    def _connect(self) -> None:
        if self._keys:
            present_key(self._socket, self._keys)
        self._socket.connect(self.endpoint)

    def _read_into(self, heard: Callable[[list[zmq.Frame]], None]) -> None:
        self._tasks.append(asyncio.get_running_loop().create_task(self._read(heard), name="foreign reader"))

    async def _read(self, heard: Callable[[list[zmq.Frame]], None]) -> None:
        while True:
            heard(await self._socket.recv_multipart(copy=False))
            # A recv that finds a message does not give the loop a turn: one who floods us would take them all.
            await asyncio.sleep(0)

    def _watch(self, told: Callable[[int], None]) -> None:
        """Tell connections that came and went."""
        self._monitor = self._socket.get_monitor_socket(_CONNECTION_EVENTS)

        async def watch() -> None:
            while True:
                frames = await self._monitor.recv_multipart()
                told(int.from_bytes(frames[0][:2], "little"))

        self._tasks.append(asyncio.get_running_loop().create_task(watch(), name="foreign monitor"))

    def _send(self, frames: Sequence[bytes]) -> None:
        try:
            # With NOBLOCK the future is done when it is returned.
            future = self._socket.send_multipart(frames, flags=zmq.NOBLOCK)
            if not future.done():
                future.cancel()
                raise zmq.ZMQError(zmq.EAGAIN)
            if error := future.exception():
                raise error
        except zmq.ZMQError as error:
            if error.errno == zmq.EHOSTUNREACH:
                raise PeerGoneError("the other end is gone") from error
            if error.errno == zmq.EAGAIN:
                raise PeerStuckError("the other end does not read") from error
            raise ServiceError(f"cannot send to {self.endpoint}: {error}") from error

    async def watched(self) -> None:
        """Returns never, and raises when reading fails. For whoever ends a process then."""
        await asyncio.gather(*self._tasks)

    async def close(self) -> None:
        """Close the socket; what was sent has a moment to leave."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._release()

    def _release(self) -> None:
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
            self._monitor = None
        self._socket.close()
        if self._judge:
            self._judge.stop()
            self._judge = None
        if self._own_context:
            self._own_context.term()
            self._own_context = None
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


Heard = Callable[[bytes, list[zmq.Frame]], None]


class ForeignOwner(_Foreign):
    """The binding end, for any number of clients. `endpoint` holds the real port when 0 was asked for.

    `heard(peer, frames)` is called for each message; it must not raise. `left()` when a connection went.
    """

    _type = zmq.ROUTER

    def __init__(
        self, endpoint: str, heard: Heard, left: Callable[[], None], keys: CurveKeys | None = None
    ) -> None:
        super().__init__(endpoint, keys)
        self._watch(lambda event: left() if event == zmq.EVENT_DISCONNECTED else None)
        self._read_into(lambda frames: heard(frames[0].bytes, frames[1:]))

    def _attach(self) -> None:
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._bind()

    def send(self, peer: bytes, frames: Sequence[bytes]) -> None:
        """Raises PeerGoneError or PeerStuckError."""
        self._send([peer, *frames])


class ForeignAsker(_Foreign):
    """The connecting end of a ForeignOwner. `heard(frames)` is called for each message; it must not raise."""

    _type = zmq.DEALER

    def __init__(
        self,
        endpoint: str,
        heard: Callable[[list[zmq.Frame]], None],
        left: Callable[[], None],
        keys: CurveKeys | None = None,
    ) -> None:
        super().__init__(endpoint, keys)
        self._watch(lambda event: left() if event == zmq.EVENT_DISCONNECTED else None)
        self._read_into(heard)

    def _attach(self) -> None:
        self._connect()

    async def send(self, frames: Sequence[bytes], wait_s: float) -> None:
        """Waits up to `wait_s` for a connection or for room, then raises ServiceError."""
        give_up_at = time.monotonic() + wait_s
        while True:
            try:
                return self._send(frames)
            except PeerStuckError as error:
                left_ms = int((give_up_at - time.monotonic()) * 1000)
                if left_ms <= 0:
                    raise ServiceError(
                        f"nobody takes messages at {self.endpoint}; does the gateway run?"
                    ) from error
                await self._socket.poll(left_ms, zmq.POLLOUT)


class Publisher(_Foreign):
    """Tells everybody who subscribed. ZeroMQ drops what a slow subscriber does not take (EVENTS_HWM_MESSAGES)."""

    _type = zmq.XPUB
    _hwm = EVENTS_HWM_MESSAGES
    _frame_bytes_max = SUBSCRIPTION_BYTES_MAX

    def __init__(self, endpoint: str, joined: Callable[[], None], keys: CurveKeys | None = None) -> None:
        """`joined()` is called when somebody subscribed."""
        super().__init__(endpoint, keys)
        self._read_into(lambda frames: joined() if frames[0].bytes[:1] == b"\x01" else None)

    def _attach(self) -> None:
        self._socket.setsockopt(zmq.XPUB_VERBOSE, 1)
        self._bind()

    def send(self, frames: Sequence[bytes]) -> None:
        """Publish; the first frame is the topic."""
        self._send(frames)


class Listener(_Foreign):
    """The connecting end of a Publisher. `heard(frames)` is called for each event; it must not raise."""

    _type = zmq.SUB
    _hwm = EVENTS_HWM_MESSAGES

    def __init__(
        self,
        endpoint: str,
        topics: Iterable[str],
        heard: Callable[[list[zmq.Frame]], None],
        keys: CurveKeys | None = None,
    ) -> None:
        """`topics`: beginnings of the topics wanted; an empty one is all of them."""
        self._topics = tuple(topics)
        super().__init__(endpoint, keys)
        self._read_into(heard)

    def _attach(self) -> None:
        for topic in self._topics:
            self._socket.setsockopt(zmq.SUBSCRIBE, topic.encode())
        self._connect()

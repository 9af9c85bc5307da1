"""The bus: typed messages over ZeroMQ. The only file that imports zmq.

    Asker, Owner                  for asyncio: one reader task per socket feeds a queue; a recv is never cancelled
    BlockingAsker, BlockingOwner  for a thread of its own: recv with a deadline and an optional hot window

An asker (DEALER) connects, an owner (ROUTER) binds. What a message may be and what its numbers mean is decided in
common.wire.codec and services.runtime.conversation; this file only moves frames. Nothing is dropped in silence: a
message that cannot leave raises the route's error, one that must not be used is counted and told as a BusEvent.

Arrays travel without a copy (from 64 KiB on), so an array given to `send` must not be changed afterwards.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path
from typing import Any

import zmq
import zmq.asyncio
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from common.errors import ServiceError, SettingError
from common.wire.messages import Message
from common.wire.routes import Route
from services.runtime.conversation import BusEvent, Conversation, Received, peer_name
from services.runtime.endpoints import CurveKeys, check_endpoint

CONNECT_WAIT_S = 2.0
"""How long an asker's send waits for a connection before it gives up."""
LINGER_MS = 200
HEARTBEAT_MS = 2_000
HEARTBEAT_TIMEOUT_MS = 10_000
RECONNECT_MS = (20, 1_000)

_EVENTS = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_DISCONNECTED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)

EventSink = Callable[[BusEvent], None]


def new_key_pair() -> tuple[bytes, bytes]:
    """A fresh CURVE key pair (public, secret), z85."""
    return zmq.curve_keypair()


class _Channel:
    """One socket with its conversation. Subclasses say how they wait."""

    _type = zmq.DEALER
    _side = "asker"

    def __init__(
        self,
        route: Route,
        endpoint: str,
        *,
        name: str | None = None,
        epoch: int | None = None,
        on_event: EventSink | None = None,
        keys: CurveKeys | None = None,
    ) -> None:
        check_endpoint(endpoint, has_keys=keys is not None)
        self.route = route
        self.conversation = Conversation(
            route,
            self._side,
            name=name or getattr(route, self._side),
            epoch=epoch,
            on_event=on_event,
        )
        self.endpoint = endpoint
        self.connected = False
        """Whether the socket has a peer that shook hands (askers only)."""
        self._closed = False
        self._lock_fd = -1
        # A channel with keys has a context of its own, because the judge of client keys serves a whole context.
        self._own_context = zmq.Context() if keys else None
        self._context = self._own_context or zmq.Context.instance()
        self._judge: ThreadAuthenticator | None = None
        self._monitor: zmq.Socket | None = None
        self._socket = self._new_socket()
        try:
            self._configure()
            if keys:
                self._secure(keys)
            self._monitor = self._socket.get_monitor_socket(_EVENTS)
            self._attach()
        except BaseException:
            self._release()
            raise

    def _new_socket(self) -> zmq.Socket:
        return self._context.socket(self._type)

    def _configure(self) -> None:
        socket, route = self._socket, self.route
        socket.setsockopt(zmq.SNDHWM, route.hwm)
        socket.setsockopt(zmq.RCVHWM, route.hwm)
        socket.setsockopt(zmq.LINGER, LINGER_MS)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, route.frame_bytes_max)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TTL, HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS[0])
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])

    def _secure(self, keys: CurveKeys) -> None:
        self._socket.curve_publickey = keys.public
        self._socket.curve_secretkey = keys.secret
        if self._side == "asker":
            if len(keys.pinned) != 1:
                raise SettingError(f"keys: an asker pins one key, its owner's; {len(keys.pinned)} given")
            (self._socket.curve_serverkey,) = keys.pinned
            return
        self._socket.curve_server = True
        self._socket.zap_domain = self.route.name.encode()
        self._judge = ThreadAuthenticator(self._context)
        self._judge.start()
        self._judge.configure_curve_callback(self.route.name, _Pinned(keys.pinned))

    def _attach(self) -> None:
        self._socket.setsockopt(zmq.ROUTING_ID, self.conversation.identity)
        self._socket.connect(self.endpoint)

    def _bind(self) -> None:
        """Bind, and learn the port when 0 was asked for. A second owner is refused: ZeroMQ would steal the socket."""
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._lock_fd = _lock_ipc(self.endpoint, self.route)
        bind_to = self.endpoint[:-1] + "*" if self.endpoint.endswith(":0") else self.endpoint
        try:
            self._socket.bind(bind_to)
        except zmq.ZMQError as error:
            raise ServiceError(f"route {self.route.name}: cannot bind {self.endpoint}: {error}") from error
        self.endpoint = self._socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode()

    def _unsent(self, error: zmq.ZMQError, to: bytes) -> Exception:
        """The route's error for a message that could not leave."""
        other = peer_name(to) if to else self.route.owner
        if error.errno == zmq.EHOSTUNREACH:
            self.conversation.lost_peer("it is not connected any more", to)
            return self.route.error(f"route {self.route.name}: {other} is gone")
        if error.errno != zmq.EAGAIN:
            return self.route.error(f"route {self.route.name}: {error}")
        if to or self.connected:
            return self.route.error(
                f"route {self.route.name}: {other} does not read; {self.route.hwm} messages wait for it"
            )
        return self.route.error(f"route {self.route.name}: no connection to {other} at {self.endpoint}")

    def _noticed(self, frames: Sequence[bytes]) -> None:
        """Take in one event of the socket's monitor."""
        event = parse_monitor_message(list(frames))["event"]
        if event == zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.connected = self._side == "asker"
        elif event == zmq.EVENT_DISCONNECTED:
            if self.connected:
                self.connected = False
                self.conversation.lost_peer("the connection went down")
        else:
            self.conversation.refused("the handshake failed: wrong keys, or not one of ours")

    def _release(self) -> None:
        self._closed = True
        if self._monitor is not None:
            self._socket.disable_monitor()
            self._monitor.close()
        self._socket.close()
        if self._judge:
            self._judge.stop()
        if self._own_context:
            self._own_context.term()
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1


class _AsyncChannel(_Channel):
    """The asyncio forms. Made inside a running loop, closed with `await close()` or `async with`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._queue: asyncio.Queue[Received | BaseException | None] = asyncio.Queue(self.route.hwm)
        loop = asyncio.get_running_loop()
        self._changed = asyncio.Event()
        self._tasks = [
            loop.create_task(self._read(), name=f"bus {self.route.name} reader"),
            loop.create_task(self._watch(), name=f"bus {self.route.name} monitor"),
        ]

    def _new_socket(self) -> zmq.asyncio.Socket:
        return zmq.asyncio.Context.shadow(self._context).socket(self._type)

    async def receive(self) -> Received:
        """The next message. Cancelling this loses nothing. Raises ServiceError once the channel is closed."""
        if self._closed and self._queue.empty():
            raise ServiceError(f"route {self.route.name} is closed")
        item = await self._queue.get()
        if isinstance(item, Received):
            return item
        self._queue.put_nowait(item) if not self._queue.full() else None
        raise item or ServiceError(f"route {self.route.name} is closed")

    async def __aiter__(self) -> AsyncIterator[Received]:
        while True:
            try:
                yield await self.receive()
            except ServiceError:
                if not self._closed:
                    raise
                return

    async def close(self) -> None:
        """Close the socket; what was sent has LINGER_MS to leave. Waiting receivers end."""
        if self._closed:
            return
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._release()
        if not self._queue.full():
            self._queue.put_nowait(None)

    async def __aenter__(self) -> Any:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _send_now(self, message: Message, arrays: Sequence[Any], to: bytes) -> None:
        frames = self.conversation.pack(message, arrays, to)
        prefix = [to] if to else []
        # With NOBLOCK the future is done when it is returned: number and send cannot be torn apart.
        future = self._socket.send_multipart([*prefix, *frames], flags=zmq.NOBLOCK, copy=False)
        if error := future.exception():
            raise error
        self.conversation.sent(to)

    async def _read(self) -> None:
        try:
            while True:
                frames = await self._socket.recv_multipart(copy=False)
                received = _open(self.conversation, self._side, frames)
                if received is not None:
                    await self._queue.put(received)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            await self._queue.put(error)

    async def _watch(self) -> None:
        while True:
            self._noticed(await self._monitor.recv_multipart())
            self._changed.set()


class Asker(_AsyncChannel):
    """The connecting end of a route, for asyncio."""

    async def send(self, message: Message, *arrays: Any, wait_s: float = CONNECT_WAIT_S) -> None:
        """Send to the owner; waits up to `wait_s` for a connection or for room, then raises the route's error."""
        deadline = time.monotonic() + wait_s
        while True:
            try:
                return self._send_now(message, arrays, b"")
            except zmq.ZMQError as error:
                left_ms = int((deadline - time.monotonic()) * 1000)
                if error.errno != zmq.EAGAIN or left_ms <= 0:
                    raise self._unsent(error, b"") from error
                await self._socket.poll(left_ms, zmq.POLLOUT)

    async def wait_connected(self, timeout_s: float) -> None:
        """Return when the owner shook hands. Raises the route's error after `timeout_s`."""
        try:
            async with asyncio.timeout(timeout_s):
                while not self.connected:
                    self._changed.clear()
                    await self._changed.wait()
        except TimeoutError:
            raise self.route.error(
                f"route {self.route.name}: no connection to {self.route.owner} at {self.endpoint} in {timeout_s:g} s"
            ) from None


class Owner(_AsyncChannel):
    """The binding end of a route, for asyncio. `endpoint` holds the real port when 0 was asked for."""

    _type = zmq.ROUTER
    _side = "owner"

    def _attach(self) -> None:
        self._bind()

    async def send(self, message: Message, *arrays: Any, to: bytes) -> None:
        """Send to the asker at address `to` (Received.peer). Raises the route's error when it is gone or stuck."""
        try:
            self._send_now(message, arrays, to)
        except zmq.ZMQError as error:
            raise self._unsent(error, to) from error


class _BlockingChannel(_Channel):
    """The thread forms: one thread at a time uses the channel."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._monitor, zmq.POLLIN)

    def recv(self, timeout_s: float | None, *, hot_s: float = 0.0) -> Received | None:
        """The next message, or None after `timeout_s` (None: wait for ever; 0: only look).

        For the first `hot_s` seconds the socket is asked again and again without blocking: a thread that is awake
        answers in half the time of one that the kernel must wake.
        """
        start = time.monotonic()
        if hot_s:
            hot_until = start + (hot_s if timeout_s is None else min(hot_s, timeout_s))
            while time.monotonic() < hot_until:
                if (received := self._try_recv()) is not None:
                    return received
                os.sched_yield()
        while True:
            if (received := self._try_recv()) is not None:
                return received
            left_s = None if timeout_s is None else start + timeout_s - time.monotonic()
            if left_s is not None and left_s <= 0:
                return None
            self._wait(left_s)

    def wait(self, timeout_s: float | None, *sockets: Any) -> list[Any]:
        """Those of this channel and `sockets` (anything with fileno()) that can be read; empty after `timeout_s`."""
        for other in sockets:
            self._poller.register(other, zmq.POLLIN)
        try:
            ready = self._wait(timeout_s)
        finally:
            for other in sockets:
                self._poller.unregister(other)
        # The poller answers with descriptors for everything that is not a ZeroMQ socket.
        by_fd = {other.fileno(): other for other in sockets}
        return [self if item is self._socket else by_fd[item] for item in ready]

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
        while True:
            try:
                frames = self._socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                return None
            if (received := _open(self.conversation, self._side, frames)) is not None:
                return received

    def _send_within(self, message: Message, arrays: Sequence[Any], to: bytes, wait_s: float) -> None:
        frames = self.conversation.pack(message, arrays, to)
        prefix = [to] if to else []
        self._socket.setsockopt(zmq.SNDTIMEO, int(wait_s * 1000))
        try:
            self._socket.send_multipart([*prefix, *frames], copy=False)
        except zmq.ZMQError as error:
            raise self._unsent(error, to) from error
        self.conversation.sent(to)


class BlockingAsker(_BlockingChannel):
    """The connecting end of a route, for a thread."""

    def send(self, message: Message, *arrays: Any, wait_s: float = CONNECT_WAIT_S) -> None:
        """Send to the owner; waits up to `wait_s` for a connection or for room, then raises the route's error."""
        self._send_within(message, arrays, b"", wait_s)


class BlockingOwner(_BlockingChannel):
    """The binding end of a route, for a thread. `endpoint` holds the real port when 0 was asked for."""

    _type = zmq.ROUTER
    _side = "owner"

    def _attach(self) -> None:
        self._bind()

    def send(self, message: Message, *arrays: Any, to: bytes, wait_s: float = 0.0) -> None:
        """Send to the asker at address `to`. Raises the route's error when it is gone, or stuck for `wait_s`."""
        self._send_within(message, arrays, to, wait_s)


class _Pinned:
    """Says yes to the client keys that were pinned."""

    def __init__(self, keys: frozenset[bytes]) -> None:
        self._keys = keys

    def callback(self, _domain: str, key: bytes) -> bool:
        return key in self._keys


def _open(conversation: Conversation, side: str, frames: Sequence[zmq.Frame]) -> Received | None:
    views = [frame.buffer for frame in frames]
    if side == "owner":
        return conversation.open(views[1:], bytes(views[0]))
    return conversation.open(views)


def _lock_ipc(endpoint: str, route: Route) -> int:
    """Hold a lock beside an ipc socket, so that a second owner is refused. Returns the descriptor, -1 for tcp."""
    if not endpoint.startswith("ipc://"):
        return -1
    path = Path(endpoint.removeprefix("ipc://") + ".lock")
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        raise ServiceError(
            f"route {route.name}: another process already serves {endpoint}; stop it or use another run directory"
        ) from None
    return fd

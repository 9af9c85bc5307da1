"""The asyncio forms of a channel. A socket has one reader task; whoever waits, waits for the queue it feeds."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import zmq
import zmq.asyncio

from common.errors import ServiceError
from common.wire.messages import Message
from services.runtime.bus.channel import CONNECT_WAIT_S, Channel
from services.runtime.conversation import Received


class _AsyncChannel(Channel):
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
        future: Any = self._socket.send_multipart([*prefix, *frames], flags=zmq.NOBLOCK, copy=False)
        if not future.done():
            # Another task waits for room on this socket, and pyzmq put us behind it: there is no room now.
            future.cancel()
            raise zmq.ZMQError(zmq.EAGAIN)
        if error := future.exception():
            raise error
        self.conversation.sent(to)

    async def _read(self) -> None:
        try:
            while True:
                frames = await self._socket.recv_multipart(copy=False)
                received = self._opened(frames)
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
        """Send to the owner; waits up to `wait_s` for a connection or for room, then raises the route's error.

        What was sent before the loss of a connection was noticed may be lost with it; nothing that is sent after that.
        """
        deadline = time.monotonic() + wait_s
        if not self.connected:  # ZeroMQ may still take a message for the connection that just went down
            await self.wait_connected(wait_s)
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

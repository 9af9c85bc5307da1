"""One ZeroMQ socket with its conversation: options, keys, the monitor, errors. How to wait is not decided here.

Called by the asyncio forms (tasks.py) and the blocking forms (blocking.py) of this package only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from common.wire.codec import Side
from common.wire.routes import Route
from services.runtime.bus.sockets import bind, configure, demand_keys, present_key
from services.runtime.conversation import BusEvent, Conversation, Received, peer_name
from services.runtime.endpoints import CurveKeys, check_endpoint

CONNECT_WAIT_S = 2.0
"""How long an asker's send waits for a connection before it gives up."""

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


def public_key_of(secret: bytes) -> bytes:
    """The public key (z85) that belongs to a secret one. Raises ValueError when it is not a key."""
    return zmq.curve_public(secret)


def libzmq_version() -> str:
    """Version of the ZeroMQ library itself."""
    return zmq.zmq_version()


class Channel:
    """One socket with its conversation. Subclasses say how they wait."""

    _type = zmq.DEALER
    _side: Side = "asker"

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
        self._n_losses = 0
        self._closed = False
        self._lock_fd = -1
        # A channel with keys has a context of its own, because the judge of client keys serves a whole context.
        self._own_context = zmq.Context() if keys else None
        self._context = self._own_context or zmq.Context.instance()
        self._judge: ThreadAuthenticator | None = None
        self._monitor: zmq.Socket | None = None
        self._socket = self._new_socket()
        try:
            configure(self._socket, hwm=self.route.hwm, frame_bytes_max=self.route.frame_bytes_max)
            if keys:
                self._secure(keys)
            self._monitor = self._socket.get_monitor_socket(_EVENTS)
            self._attach()
        except BaseException:
            self._release()
            raise

    def _new_socket(self) -> zmq.Socket:
        return self._context.socket(self._type)

    def _secure(self, keys: CurveKeys) -> None:
        if self._side == "asker":
            present_key(self._socket, keys)
        else:
            self._judge = demand_keys(self._context, self._socket, keys, self.route.name)

    def _attach(self) -> None:
        self._socket.setsockopt(zmq.ROUTING_ID, self.conversation.identity)
        self._socket.connect(self.endpoint)

    def _bind(self) -> None:
        """Bind, and learn the port when 0 was asked for. A second owner is refused: ZeroMQ would steal the socket."""
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self.endpoint, self._lock_fd = bind(self._socket, self.endpoint, f"route {self.route.name}")

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
                self._n_losses += 1
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

    def _opened(self, frames: Sequence[zmq.Frame]) -> Received | None:
        views = [frame.buffer for frame in frames]
        if self._side == "owner":
            return self.conversation.open(views[1:], bytes(views[0]))
        return self.conversation.open(views)

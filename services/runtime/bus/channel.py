"""One ZeroMQ socket with its conversation: options, keys, the monitor, errors. How to wait is not decided here.

Called by the asyncio forms (tasks.py) and the blocking forms (blocking.py) of this package only.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Sequence
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils.monitor import parse_monitor_message

from common.errors import ServiceError, SettingError
from common.wire.codec import Side
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

    def _opened(self, frames: Sequence[zmq.Frame]) -> Received | None:
        views = [frame.buffer for frame in frames]
        if self._side == "owner":
            return self.conversation.open(views[1:], bytes(views[0]))
        return self.conversation.open(views)


class _Pinned:
    """Says yes to the client keys that were pinned."""

    def __init__(self, keys: frozenset[bytes]) -> None:
        self._keys = keys

    def callback(self, _domain: str, key: bytes) -> bool:
        return key in self._keys


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

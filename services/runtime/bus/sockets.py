"""What every ZeroMQ socket of ours has in common: bounds, keepalive, keys, and a bind that refuses a second owner.

Knows no message. Called by channel.py (the bus) and by foreign.py (programs that are not ours).
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

import zmq
from zmq.auth.thread import ThreadAuthenticator

from common.errors import ServiceError, SettingError
from services.runtime.endpoints import CurveKeys

LINGER_MS = 200
KEEPALIVE_IDLE_S, KEEPALIVE_EVERY_S, KEEPALIVE_TRIES = 5, 2, 3
"""Of TCP: a peer whose machine or cable is gone is noticed after about ten seconds."""
RECONNECT_MS = (20, 1_000)


def configure(socket: zmq.Socket, *, hwm: int, frame_bytes_max: int) -> None:
    """Bounds (messages waiting each way, bytes of a frame that is taken in), keepalive, reconnecting.

    ZeroMQ's own heartbeats stay off: libzmq 4.3.5 aborts the whole process when a peer dies while more messages wait
    than a socket takes in, as soon as its heartbeat is due. That a peer computes no more is told by our own messages.
    """
    socket.setsockopt(zmq.SNDHWM, hwm)
    socket.setsockopt(zmq.RCVHWM, hwm)
    socket.setsockopt(zmq.LINGER, LINGER_MS)
    socket.setsockopt(zmq.IMMEDIATE, 1)
    socket.setsockopt(zmq.MAXMSGSIZE, frame_bytes_max)
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, KEEPALIVE_IDLE_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, KEEPALIVE_EVERY_S)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, KEEPALIVE_TRIES)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS[0])
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MS[1])


def present_key(socket: zmq.Socket, keys: CurveKeys) -> None:
    """A connecting socket shows its key and pins its owner's. Raises SettingError unless just one is pinned."""
    if len(keys.pinned) != 1:
        raise SettingError(f"keys: an asker pins one key, its owner's; {len(keys.pinned)} given")
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    (socket.curve_serverkey,) = keys.pinned


def demand_keys(
    context: zmq.Context, socket: zmq.Socket, keys: CurveKeys, domain: str
) -> ThreadAuthenticator:
    """A binding socket lets in only the pinned keys. Returns the judge, to be stopped; it serves the whole context."""
    socket.curve_publickey = keys.public
    socket.curve_secretkey = keys.secret
    socket.curve_server = True
    socket.zap_domain = domain.encode()
    judge = ThreadAuthenticator(context)
    judge.start()
    judge.configure_curve_callback(domain, _Pinned(keys.pinned))
    return judge


def bind(socket: zmq.Socket, endpoint: str, name: str) -> tuple[str, int]:
    """Bind; returns the real endpoint (port 0 takes a free one) and a lock's descriptor, -1 for tcp.

    Raises ServiceError when it is taken: of ipc sockets, ZeroMQ itself would let a second owner steal the first's.
    """
    lock_fd = _lock_ipc(endpoint, name)
    bind_to = endpoint[:-1] + "*" if endpoint.endswith(":0") else endpoint
    try:
        socket.bind(bind_to)
    except zmq.ZMQError as error:
        if lock_fd >= 0:
            os.close(lock_fd)
        raise ServiceError(f"{name}: cannot bind {endpoint}: {error}") from error
    return socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode(), lock_fd


class _Pinned:
    """Says yes to the client keys that were pinned."""

    def __init__(self, keys: frozenset[bytes]) -> None:
        self._keys = keys

    def callback(self, _domain: str, key: bytes) -> bool:
        return key in self._keys


def _lock_ipc(endpoint: str, name: str) -> int:
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
            f"{name}: another process already serves {endpoint}; stop it or use another run directory"
        ) from None
    return fd

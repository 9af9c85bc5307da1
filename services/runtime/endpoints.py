"""Where a route may live: ipc:// in a private directory, tcp:// on loopback, tcp:// elsewhere with keys on both sides.

Pure checks and names; opens no socket. services.runtime.bus asks here before it binds or connects, and whoever wires
processes together gets a route's address from `route_endpoint`.
"""

from __future__ import annotations

import ipaddress
import os
import stat
import sys
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from common.errors import SettingError
from common.wire.routes import Route

SOCKET_PATH_BYTES_MAX = 103 if sys.platform == "darwin" else 107
"""sun_path of the kernel, less its closing zero: a longer path cannot be bound."""

PUBLIC_SOCKET, EVENTS_SOCKET = "public.sock", "events.sock"
"""Files in the run directory, of the gateway's endpoint for ZeroMQ clients and of its events."""


@dataclass(frozen=True)
class CurveKeys:
    """Our CURVE key pair and the public keys of those we talk with (z85, 40 characters each).

    An owner admits the askers whose keys are in `pinned`; an asker pins exactly one key, its owner's.
    """

    public: bytes
    secret: bytes
    pinned: frozenset[bytes]

    def __repr__(self) -> str:
        return f"CurveKeys(public={self.public!r}, secret=<hidden>, pinned={sorted(self.pinned)})"


def route_endpoint(run_dir: Path, route: Route, worker: int = 0) -> str:
    """ipc address of `route` in `run_dir`; of several bridges each has its own, by the number of its worker.

    Raises SettingError when the path is longer than a socket's may be.
    """
    number = f"-{worker}" if worker else ""
    return ipc_endpoint(run_dir / f"{route.name}{number}.sock")


def ipc_endpoint(path: Path) -> str:
    """ipc address of a socket file, length checked."""
    length = len(os.fsencode(path))
    if length > SOCKET_PATH_BYTES_MAX:
        raise SettingError(
            f"run_dir: the socket path {path} has {length} bytes and this system allows {SOCKET_PATH_BYTES_MAX}; "
            f"choose a shorter directory (OUTRIGGER_RUN_DIR)"
        )
    return f"ipc://{path}"


def check_endpoint(endpoint: str, *, has_keys: bool) -> None:
    """Refuse an address that would let strangers in. Raises SettingError saying what is missing."""
    scheme, _, rest = endpoint.partition("://")
    if scheme == "ipc":
        _check_ipc(endpoint, rest)
    elif scheme == "tcp":
        if not has_keys and not is_loopback(endpoint):
            raise SettingError(
                f"endpoint {endpoint}: an address other than loopback needs CURVE keys on both sides; "
                f"give keys, or use 127.0.0.1 or ipc://"
            )
    else:
        raise SettingError(f"endpoint {endpoint}: use ipc://PATH or tcp://HOST:PORT")


def is_loopback(endpoint: str) -> bool:
    """Whether a tcp:// address can be reached from this machine only. Wildcards and names other than localhost: no."""
    host = urlsplit(endpoint).hostname or ""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_ipc(endpoint: str, path_text: str) -> None:
    """The socket's directory must be ours and closed to others: file modes are the only lock of an ipc socket."""
    if not path_text.startswith("/"):
        raise SettingError(f"endpoint {endpoint}: give an absolute path (abstract sockets have no owner)")
    path = Path(path_text)
    ipc_endpoint(path)
    check_private_directory(path.parent)


def check_private_directory(directory: Path) -> None:
    """Raise SettingError unless `directory` is a real directory of this user with mode 0700."""
    try:
        found = directory.lstat()
    except FileNotFoundError:
        raise SettingError(f"run_dir: {directory} does not exist") from None
    if not stat.S_ISDIR(found.st_mode):
        raise SettingError(f"run_dir: {directory} is not a directory (links are refused)")
    if found.st_uid != os.getuid():
        raise SettingError(f"run_dir: {directory} belongs to user {found.st_uid}, not to {os.getuid()}")
    if stat.S_IMODE(found.st_mode) & 0o077:
        mode = stat.S_IMODE(found.st_mode)
        raise SettingError(
            f"run_dir: {directory} has mode {mode:04o} and others could reach its sockets; run: chmod 700 {directory}"
        )

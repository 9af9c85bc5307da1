"""Where the ZeroMQ door listens, and whose keys it asks for: from settings to open sockets.

Always over ipc in the run directory, which is closed to other users. Over tcp as the settings say: on loopback
without keys, elsewhere only with CURVE keys. With an API key and no CURVE keys, tcp stays closed: a key that HTTP asks
for must not be walked around. Called by __main__.py.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from common.config import ZmqSettings
from common.errors import SettingError
from common.log import get_log
from services.gateway.public_door import PublicDoor
from services.gateway.public_events import Events
from services.runtime.bus import public_key_of
from services.runtime.endpoints import (
    EVENTS_SOCKET,
    PUBLIC_SOCKET,
    CurveKeys,
    check_endpoint,
    ipc_endpoint,
)
from services.runtime.key_files import read_key, read_keys

Watch = Callable[[Coroutine[Any, Any, None]], Any]

_log = get_log()


def keys_of(settings: ZmqSettings) -> CurveKeys | None:
    """Our key and the clients' from their files; None when none are set. Raises SettingError."""
    if not settings.secret_file and not settings.clients_file:
        return None
    if not settings.secret_file or not settings.clients_file:
        missing = "OUTRIGGER_ZMQ_CLIENTS_FILE" if settings.secret_file else "OUTRIGGER_ZMQ_SECRET_FILE"
        raise SettingError(f"{missing} is not set; CURVE needs our secret key and the keys of the clients")
    secret = read_key(settings.secret_file, "OUTRIGGER_ZMQ_SECRET_FILE")
    clients = read_keys(settings.clients_file, "OUTRIGGER_ZMQ_CLIENTS_FILE")
    return CurveKeys(public_key_of(secret), secret, frozenset(clients))


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses, checked, with the keys for those over tcp."""

    ask: tuple[str, ...]
    events: tuple[str, ...]
    keys: CurveKeys | None


def plan_endpoints(settings: ZmqSettings, run_dir: Path, *, has_api_key: bool) -> Endpoints:
    """Where to listen: ipc, then tcp. Raises SettingError for what may not be, before anything is opened."""
    keys = keys_of(settings)
    ask, events = (ipc_endpoint(run_dir / name) for name in (PUBLIC_SOCKET, EVENTS_SOCKET))
    if has_api_key and keys is None:
        return Endpoints((ask,), (events,), None)
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    over_tcp = [f"tcp://{host}:{port}" for port in (settings.port, settings.events_port)]
    for endpoint in over_tcp:
        check_endpoint(endpoint, has_keys=keys is not None)
    return Endpoints((ask, over_tcp[0]), (events, over_tcp[1]), keys)


async def open_endpoints(
    stack: AsyncExitStack, door: PublicDoor, events: Events, where: Endpoints, watch: Watch
) -> dict[str, str]:
    """Open everything; closed when `stack` is left. Returns where, by purpose. Raises ServiceError.

    `watch` gets a coroutine of each socket that raises when its reading fails.
    """
    listens = {}
    if not any(endpoint.startswith("tcp://") for endpoint in where.ask):
        _log.warning("zmq over tcp stays closed", reason="an API key is set and no CURVE keys; ipc is open")
    for purpose, opener, endpoints in (
        ("zmq", door.listen, where.ask),
        ("zmq_events", events.listen, where.events),
    ):
        for endpoint in endpoints:
            over_tcp = endpoint.startswith("tcp://")
            socket = await stack.enter_async_context(opener(endpoint, where.keys if over_tcp else None))
            watch(socket.watched())
            listens[purpose if over_tcp else f"{purpose}_ipc"] = socket.endpoint
    return listens

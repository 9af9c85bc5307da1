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
from services.runtime.endpoints import CurveKeys, check_endpoint, ipc_endpoint

IPC_NAME, IPC_EVENTS_NAME = "public.sock", "events.sock"

Watch = Callable[[Coroutine[Any, Any, None]], Any]

_log = get_log()


def read_keys(settings: ZmqSettings) -> CurveKeys | None:
    """Our key and the clients' from their files; None when none are set. Raises SettingError."""
    if not settings.secret_file and not settings.clients_file:
        return None
    if not settings.secret_file or not settings.clients_file:
        missing = "OUTRIGGER_ZMQ_CLIENTS_FILE" if settings.secret_file else "OUTRIGGER_ZMQ_SECRET_FILE"
        raise SettingError(f"{missing} is not set; CURVE needs our secret key and the keys of the clients")
    secret = _key_lines(settings.secret_file, "OUTRIGGER_ZMQ_SECRET_FILE")
    if len(secret) != 1:
        raise SettingError(
            f"OUTRIGGER_ZMQ_SECRET_FILE = {settings.secret_file}: {len(secret)} keys; one is needed"
        )
    clients = _key_lines(settings.clients_file, "OUTRIGGER_ZMQ_CLIENTS_FILE")
    return CurveKeys(public_key_of(secret[0]), secret[0], frozenset(clients))


@dataclass(frozen=True, slots=True)
class Endpoints:
    """Addresses, checked, with the keys for those over tcp."""

    ask: tuple[str, ...]
    events: tuple[str, ...]
    keys: CurveKeys | None


def plan_endpoints(settings: ZmqSettings, run_dir: Path, *, has_api_key: bool) -> Endpoints:
    """Where to listen: ipc, then tcp. Raises SettingError for what may not be, before anything is opened."""
    keys = read_keys(settings)
    ask, events = (ipc_endpoint(run_dir / name) for name in (IPC_NAME, IPC_EVENTS_NAME))
    if has_api_key and keys is None:
        _log.warning("zmq over tcp stays closed", reason="an API key is set and no CURVE keys; ipc is open")
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


def _key_lines(file: str, variable: str) -> list[bytes]:
    """The z85 keys in a file, one a line; empty lines and # comments aside."""
    try:
        text = Path(file).expanduser().read_text(encoding="ascii")
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"{variable} = {file}: cannot be read: {error}") from error
    keys = [line.encode() for line in map(str.strip, text.splitlines()) if line and not line.startswith("#")]
    for key in keys:
        try:
            public_key_of(key)  # any 40 characters of z85 will do: it says whether they are
        except ValueError:
            raise SettingError(
                f"{variable} = {file}: a key has 40 characters, as `outrigger keys new` writes them; "
                f"found a line of {len(key)}"
            ) from None
    return keys

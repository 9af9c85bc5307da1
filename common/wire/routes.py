"""Who says what to whom on the bus: one table.

Control and data travel on separate sockets. Every route is a DEALER (the asker) and a ROUTER (the owner, who binds).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import UnionType

from common import limits
from common.errors import LinkDownError, OutriggerError, ServiceError
from common.wire import held as h
from common.wire import messages as m


@dataclass(frozen=True)
class Route:
    """One named channel: `asker` connects, `owner` binds; `ask` and `answer` are the unions allowed each way.

    `id` is what the header frame carries (never reused). `hwm` bounds the messages waiting in a socket each way,
    `frame_bytes_max` the longest frame a socket accepts. `error` is raised when the other end cannot be reached.
    """

    id: int
    name: str
    asker: str
    owner: str
    ask: UnionType | type
    answer: UnionType | type
    hwm: int = limits.BUS_HWM_MESSAGES
    frame_bytes_max: int = limits.BUS_BODY_BYTES_MAX
    error: type[OutriggerError] = ServiceError


GENERATE = Route(1, "generate", "gateway", "mac", m.GatewayToMac, m.MacToGateway)
LINK = Route(2, "link", "mac", "bridge", m.MacToBridge, m.BridgeToMac, error=LinkDownError)
RESIDUAL = Route(
    3,
    "residual",
    "mac",
    "bridge",
    m.MacToBridgeData,
    m.BridgeToMacData,
    hwm=limits.BUS_HWM_DATA_MESSAGES,
    frame_bytes_max=limits.FRAME_BYTES_MAX,
    error=LinkDownError,
)
LIFE = Route(4, "life", "any", "launch", m.ToLaunch, m.FromLaunch)
HOLD = Route(
    5,
    "hold",
    "mac",
    "broker",
    h.MacToBroker,
    h.BrokerToMac,
    hwm=limits.BUS_HWM_DATA_MESSAGES,
    frame_bytes_max=limits.FRAME_BYTES_MAX,
)
PAGES = Route(6, "pages", "broker", "bridge", h.BrokerToBridge, h.BridgeToBroker, error=LinkDownError)
ATTENTION = Route(
    7,
    "attention",
    "mac",
    "bridge",
    h.MacToBridgeAttention,
    h.BridgeToMacAttention,
    hwm=limits.BUS_HWM_DATA_MESSAGES,
    frame_bytes_max=limits.FRAME_BYTES_MAX,
    error=LinkDownError,
)

ROUTES = {route.name: route for route in (GENERATE, LINK, RESIDUAL, LIFE, HOLD, PAGES, ATTENTION)}
assert len({route.id for route in ROUTES.values()}) == len(ROUTES), "a route id names one route"

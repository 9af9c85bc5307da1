"""Who says what to whom on the bus: one table.

Control and data travel on separate sockets. Every route is a DEALER (the asker) and a ROUTER (the owner, who binds).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import UnionType

from common.wire import messages as m


@dataclass(frozen=True)
class Route:
    """One named channel: `asker` connects, `owner` binds; `ask` and `answer` are the unions allowed each way."""

    name: str
    asker: str
    owner: str
    ask: UnionType
    answer: UnionType | type


GENERATE = Route("generate", "gateway", "mac", m.GatewayToMac, m.MacToGateway)
LINK = Route("link", "mac", "bridge", m.MacToBridge, m.BridgeToMac)
RESIDUAL = Route("residual", "mac", "bridge", m.MacToBridgeData, m.BridgeToMacData)
LIFE = Route("life", "any", "launch", m.ToLaunch, m.StateChanged)

ROUTES = {route.name: route for route in (GENERATE, LINK, RESIDUAL, LIFE)}

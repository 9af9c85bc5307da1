"""`python -m services.bridge [NUMBER]`: the process between the bus and a cable.

Without a number it is the bridge of the link; with one, of that further worker that holds pages. Started by
services.launch and by benches.
"""

from __future__ import annotations

import sys
from pathlib import Path

from common.wire.routes import ATTENTION, LINK, PAGES, RESIDUAL
from services.bridge.bridge import Bridge
from services.bridge.page_bridge import PageBridge
from services.bridge.tail_server import TailServer
from services.runtime.endpoints import route_endpoint
from services.runtime.service import Life, run_service


async def body(life: Life) -> None:
    """Serve until told to stop."""
    settings = life.settings.bridge
    listens = {route.name: life.endpoint(route) for route in (LINK, RESIDUAL, PAGES, ATTENTION)}
    tails = TailServer(Path(settings.tail_file), settings.tail_host, settings.tail_port)
    if settings.tail_file:
        await tails.start()
        listens["tail"] = "http://{}:{}".format(*tails.address)
    bridge = Bridge(settings, life.metrics, life.endpoint, life.on_bus_event, life.say)
    for name, part in bridge.parts().items():
        life.spawn(part, name)
    life.follow(lambda: bridge.pump.turns)
    await life.ready(listens)
    await life.stopping.wait()
    await tails.close()
    await bridge.close()


async def page_body(life: Life, number: int) -> None:
    """Serve until told to stop."""
    endpoints = {route: route_endpoint(life.run_dir, route, number) for route in (PAGES, ATTENTION)}
    settings = life.settings.bridge
    bridge = PageBridge(settings, number, life.metrics, endpoints.__getitem__, life.on_bus_event, life.say)
    for name, part in bridge.parts().items():
        life.spawn(part, name)
    life.follow(lambda: bridge.pump.turns)
    await life.ready({route.name: endpoint for route, endpoint in endpoints.items()})
    await life.stopping.wait()
    await bridge.close()


if __name__ == "__main__":
    number = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    raise SystemExit(
        run_service("bridge", (lambda life: page_body(life, number)) if number else body, number=number)
    )

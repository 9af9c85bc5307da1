"""`python -m services.bridge`: the process between the bus and the cable. Started by services.launch and by benches."""

from __future__ import annotations

from pathlib import Path

from common.wire.routes import ATTENTION, LINK, PAGES, RESIDUAL
from services.bridge.bridge import Bridge
from services.bridge.tail_server import TailServer
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


if __name__ == "__main__":
    raise SystemExit(run_service("bridge", body))

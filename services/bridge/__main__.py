"""`python -m services.bridge`: the process between the bus and the cable. Started by services.launch and by benches."""

from __future__ import annotations

from common.wire.routes import LINK, RESIDUAL
from services.bridge.bridge import Bridge
from services.runtime.service import Life, run_service


async def body(life: Life) -> None:
    """Serve until told to stop."""
    settings = life.settings.bridge
    bridge = Bridge(settings, life.metrics, life.endpoint, life.on_bus_event)
    for name, part in bridge.parts().items():
        life.spawn(part, name)
    life.follow(lambda: bridge.pump.turns)
    await life.ready({route.name: life.endpoint(route) for route in (LINK, RESIDUAL)})
    await life.stopping.wait()
    await bridge.close()


if __name__ == "__main__":
    raise SystemExit(run_service("bridge", body))

"""`python -m services.broker`: the process that keeps old pages. Started by services.launch and by benches."""

from __future__ import annotations

from common.wire.routes import HOLD
from services.broker.broker import Broker
from services.runtime.service import Life, run_service


async def body(life: Life) -> None:
    """Serve until told to stop."""
    broker = Broker(life.settings, life.metrics, life.run_dir, life.on_bus_event)
    await broker.start()
    for name, part in broker.parts().items():
        life.spawn(part, name)
    await life.ready({HOLD.name: life.endpoint(HOLD)})
    await life.stopping.wait()
    await broker.close()


if __name__ == "__main__":
    raise SystemExit(run_service("broker", body))

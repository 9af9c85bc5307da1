"""`python -m services.mac`: the process that owns the model on the host. Started by services.launch and by benches."""

from __future__ import annotations

import asyncio

from common.config.page_workers import worker_numbers
from common.wire.routes import GENERATE
from services.mac.host import Host, load_engine
from services.runtime.service import Life, run_service


async def body(life: Life) -> None:
    """Load the model, serve until told to stop."""
    settings = life.settings
    slot = life.crash_slot()
    slot.write(f"loading {settings.host.model}")
    engine = await asyncio.to_thread(load_engine, settings.host)
    host = Host(
        engine,
        settings.host,
        life.run_dir,
        life.metrics,
        window=settings.bridge.chunk_window,
        page_workers=worker_numbers(settings),
        on_bus_event=life.on_bus_event,
        crash_slot=slot,
    )
    for name, part in host.parts():
        life.spawn(part, name)
    host.start()
    life.follow(lambda: host.beat)
    await life.ready({"generate": life.endpoint(GENERATE)}, detail=engine.spec.name)
    await life.stopping.wait()
    await host.stop()


if __name__ == "__main__":
    raise SystemExit(run_service("mac", body))

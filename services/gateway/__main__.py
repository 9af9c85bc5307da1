"""The gateway process: `python -m services.gateway`. Puts the parts together; decides nothing."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path

from common.wire.routes import GENERATE
from services.gateway.doors import require_key_off_loopback
from services.gateway.host import HostChannel
from services.gateway.prompt import PromptReader
from services.gateway.public_door import Manners, PublicDoor
from services.gateway.public_endpoints import Endpoints, open_endpoints, plan_endpoints
from services.gateway.public_events import Events
from services.gateway.server import Door, Gateway, listen
from services.gateway.streams import RequestTable
from services.gateway.trip import Trips
from services.runtime.service import Life, run_service


async def body(life: Life) -> None:
    """The life of the process between starting and stopped."""
    ours = life.settings.gateway
    require_key_off_loopback(ours.http_host, ours.api_key)
    life.allow_drain(ours.drain_s)
    where = None
    if life.settings.zmq.door == "on":
        where = plan_endpoints(life.settings.zmq, life.run_dir, has_api_key=bool(ours.api_key))
    prompts = await asyncio.to_thread(PromptReader.load, Path(life.settings.host.model), ours.chat_template)
    words = prompts.vocabulary
    events = Events()
    table = RequestTable(words.piece, words.end_ids, words.spelling)
    async with HostChannel(
        life.endpoint(GENERATE),
        table,
        beat_s_max=ours.host_stall_s,
        waiting_max=ours.requests_waiting_max,
        on_event=life.on_bus_event,
        on_status=events.status,
    ) as host:
        life.spawn(host.listen(), "listen to the host")
        life.spawn(host.tick(), "ask for the host's status")
        trips = Trips(prompts, host, life.metrics, ours.request_deadline_s, events.watch)
        gateway = Gateway(Door(ours.api_key or None, ours.stream_comment_s), trips)
        runner, port = await listen(gateway, ours.http_host, ours.http_port)
        try:
            shown = f"[{ours.http_host}]" if ":" in ours.http_host else ours.http_host
            listens = {"http": f"http://{shown}:{port}"}
            async with AsyncExitStack() as stack:
                if where is not None:
                    listens |= await _open_public(life, stack, where, trips, events)
                await life.ready(listens)
                await life.stopping.wait()
                await trips.drain(ours.drain_s)
        finally:
            await runner.cleanup()
            trips.close()


async def _open_public(
    life: Life, stack: AsyncExitStack, where: Endpoints, trips: Trips, events: Events
) -> dict[str, str]:
    """Open the ZeroMQ door until `stack` is left; returns where it listens."""
    manners = Manners(life.settings.zmq.lease_s, life.settings.zmq.stall_s)
    door = PublicDoor(trips, manners, life.metrics)
    watch = partial(life.spawn, name="ZeroMQ socket")
    listens = await open_endpoints(stack, door, events, where, watch)
    life.spawn(door.tick(), "hold ZeroMQ clients to the rules")
    stack.push_async_callback(door.close)
    return listens


if __name__ == "__main__":
    raise SystemExit(run_service("gateway", body))

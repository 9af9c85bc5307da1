"""The gateway process: `python -m services.gateway`. Puts the parts together; decides nothing."""

from __future__ import annotations

import asyncio
from pathlib import Path

from common.wire.routes import GENERATE
from services.gateway.doors import require_key_off_loopback
from services.gateway.host import HostChannel
from services.gateway.prompt import PromptReader
from services.gateway.server import Door, Gateway, listen
from services.gateway.streams import RequestTable
from services.gateway.trip import Trips
from services.runtime.service import Life, run_service

DRAIN_S = 1.0
"""How long running answers may take to end when the process is told to stop."""


async def body(life: Life) -> None:
    """The life of the process between starting and stopped."""
    ours = life.settings.gateway
    require_key_off_loopback(ours.http_host, ours.api_key)
    prompts = await asyncio.to_thread(PromptReader.load, Path(life.settings.host.model), ours.chat_template)
    words = prompts.vocabulary
    table = RequestTable(words.piece, words.end_ids, words.spelling)
    async with HostChannel(
        life.endpoint(GENERATE),
        table,
        beat_s_max=ours.host_stall_s,
        waiting_max=ours.requests_waiting_max,
        on_event=life.on_bus_event,
    ) as host:
        life.spawn(host.listen(), "listen to the host")
        life.spawn(host.tick(), "ask for the host's status")
        trips = Trips(prompts, host, life.metrics, ours.request_deadline_s)
        gateway = Gateway(Door(ours.api_key or None, ours.stream_comment_s), trips)
        runner, port = await listen(gateway, ours.http_host, ours.http_port)
        try:
            shown = f"[{ours.http_host}]" if ":" in ours.http_host else ours.http_host
            await life.ready({"http": f"http://{shown}:{port}"})
            await life.stopping.wait()
            await trips.drain(DRAIN_S)
        finally:
            await runner.cleanup()
            trips.close()


if __name__ == "__main__":
    raise SystemExit(run_service("gateway", body))

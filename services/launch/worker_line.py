"""How the worker on this machine is: asks its control channel once a second and makes messages of route LIFE of it.

The worker is at home at the far end of a cable and speaks no bus. Silence stays silence: nothing is said in its place.
Used by running.py.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from contextlib import suppress

import msgspec

from common.limits import CONTROL_LINE_BYTES_MAX
from common.wire.messages import Beat, StateChanged

ASK_EVERY_S = 1.0
TRY_EVERY_S = 0.2
ANSWER_S = 5.0


async def follow_worker(name: str, host: str, port: int, take: Callable[[StateChanged | Beat], None]) -> None:
    """Ask the worker that was started as `name` for ever; `take` gets its state and its beat, each time it answers."""
    while True:
        with suppress(OSError, TimeoutError, ValueError, KeyError, TypeError, msgspec.ValidationError):
            await _converse(name, host, port, take)
        await asyncio.sleep(TRY_EVERY_S)


async def _converse(name: str, host: str, port: int, take: Callable[[StateChanged | Beat], None]) -> None:
    reader, writer = await asyncio.open_connection(host, port, limit=CONTROL_LINE_BYTES_MAX)
    listens = {"control": f"{host}:{port}"}
    try:
        while True:
            writer.write(b"life\n")
            async with asyncio.timeout(ANSWER_S):
                await writer.drain()
                line = await reader.readline()
            if not line:
                return
            answer = json.loads(line)
            listens |= {
                kind: str(answer[kind]) for kind in ("link", "pages") if answer.get(kind, ":0") != ":0"
            }
            said = {"process": name, "pid": answer["pid"], "state": answer["state"], "listens": listens}
            said["type"] = StateChanged.__name__
            take(msgspec.convert(said, StateChanged))
            take(Beat(name, answer["pid"], answer["beat"]))
            await asyncio.sleep(ASK_EVERY_S if answer["state"] != "starting" else TRY_EVERY_S)
    finally:
        writer.close()

"""Asks a launch how its processes are, from another process. Used by `outrigger status`."""

from __future__ import annotations

import asyncio
from pathlib import Path

from common.errors import ServiceError
from common.wire.messages import AskLaunch, LaunchStatus
from common.wire.routes import LIFE
from services.runtime.bus import Asker
from services.runtime.endpoints import route_endpoint

ANSWER_S = 3.0


def ask_launch(run_dir: Path) -> LaunchStatus:
    """The status of the launch that runs here. Raises ServiceError when it does not answer."""
    return asyncio.run(_ask(run_dir))


async def _ask(run_dir: Path) -> LaunchStatus:
    async with Asker(LIFE, route_endpoint(run_dir, LIFE), name="status") as asker:
        try:
            async with asyncio.timeout(ANSWER_S):
                await asker.send(AskLaunch(), wait_s=ANSWER_S)
                while True:
                    answer = (await asker.receive()).message
                    if isinstance(answer, LaunchStatus):
                        return answer
        except TimeoutError:
            raise ServiceError(f"the launch does not answer within {ANSWER_S:g} s") from None

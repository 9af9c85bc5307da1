"""Whether the system as a whole can answer now: the last thing looked at before "ready" is said.

Every process says for itself that it is ready. What lies between them, the gateway's word from the host and the
bridge's link to the worker, comes a moment later, and a request sent in that moment would be refused, or read
without the worker. Called by services.launch.running.
"""

from __future__ import annotations

import asyncio

import aiohttp

ANSWER_S_MAX = 10.0
"""Longest wait for the gateway's own health; afterwards it speaks for itself."""
LINK_S_MAX = 5.0
"""Longest further wait for the link: a worker that cannot be reached must not hold up the host."""
LOOK_S = 0.05
SETTLED = ("ready", "refused", "resting")


async def can_answer(http: str, *, with_worker: bool) -> bool:
    """Wait until GET /health of `http` says that a token can be computed, and the worker is linked or refused.

    False when that did not come in time; the system runs all the same.
    """
    began_s = asyncio.get_running_loop().time()
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=ANSWER_S_MAX)) as session:
        while (waited_s := asyncio.get_running_loop().time() - began_s) < ANSWER_S_MAX:
            worker = await _worker_state(session, http)
            if worker is not None and (not with_worker or worker in SETTLED or waited_s > LINK_S_MAX):
                return True
            await asyncio.sleep(LOOK_S)
    return False


async def _worker_state(session: aiohttp.ClientSession, http: str) -> str | None:
    """State of the worker as the gateway tells it; None while no token can be computed."""
    try:
        async with session.get(f"{http}/health") as answer:
            told = await answer.json()
    except (aiohttp.ClientError, TimeoutError, ValueError):
        return None
    return told["worker"]["state"] if answer.status == 200 else None

"""What the bus tests share: running a coroutine with a bound, waiting for what must happen, chunks to send."""

from __future__ import annotations

import asyncio

import numpy as np

from common.wire import messages as m

WAIT_S = 20.0
"""For what must happen: long, because a busy machine is no failure."""


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 60))


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 (what is waited for happens inside ZeroMQ)
            await asyncio.sleep(0.005)


def chunk(ticket: int, n_tokens: int = 2, n_embd: int = 8) -> tuple[m.RunChunk, np.ndarray]:
    residual = np.random.default_rng(ticket).standard_normal((n_tokens, n_embd)).astype(np.float32)
    return m.RunChunk(1, ticket, 0, n_tokens, n_embd, 0), residual

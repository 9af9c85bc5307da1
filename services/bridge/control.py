"""The worker's control channel as the bridge uses it: memory, heat and state in, the host's phase out. Never urgent.

One connection for questions and one that watches, opened when needed and dropped at the first fault; the link does not
depend on them.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import msgspec

from common.errors import LinkDownError, RemoteProtocolError
from common.limits import CONTROL_LINE_BYTES_MAX
from common.wire.frozen import FrozenReport
from common.wire.messages import ShowPhase, WorkerReported

ANSWER_S_MAX = 3.0
UNKNOWN = WorkerReported(thermal=-1, avail_mb=-1, state="unknown")
"""What is reported while the control channel does not answer."""


class ControlClient:
    """Commands to the place it is aimed at. One at a time; used by one task at a time or behind its lock."""

    def __init__(self) -> None:
        self._address: tuple[str, int] | None = None
        self._lock = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def aim(self, host: str, port: int) -> None:
        """From now on talk with the worker there."""
        if self._address != (host, port):
            await self.close()
            self._address = host, port

    async def watch(self) -> AsyncIterator[WorkerReported]:
        """What the worker tells of itself whenever it changes. Raises LinkDownError or RemoteProtocolError."""
        try:
            async with asyncio.timeout(ANSWER_S_MAX):
                reader, writer = await self._open()
                writer.write(b"watch\n")
                await writer.drain()
            try:
                while text := await reader.readline():
                    yield _reported(_object(text, "watch"))
            finally:
                writer.close()
        except (OSError, TimeoutError) as error:
            raise _silent(error) from error

    async def report(self) -> WorkerReported:
        """The worker's memory, heat and state. Raises LinkDownError or RemoteProtocolError."""
        return _reported(await self.ask("mem"))

    async def show(self, phase: ShowPhase) -> None:
        """Tell the worker's screen what the host does. Raises LinkDownError or RemoteProtocolError."""
        await self.ask(f"mac {phase.phase} {phase.n1} {phase.n2} {phase.n_ctx}")

    async def ask(self, line: str) -> dict[str, Any]:
        """One command, one answer. Raises LinkDownError or RemoteProtocolError; the connection is then closed."""
        async with self._lock:
            try:
                async with asyncio.timeout(ANSWER_S_MAX):
                    return await self._exchange(line)
            except (OSError, TimeoutError, ValueError) as error:
                await self.close()
                raise _silent(error) from error
            except BaseException:
                await self.close()
                raise

    async def _exchange(self, line: str) -> dict[str, Any]:
        if self._streams is None:
            self._streams = await self._open()
        reader, writer = self._streams
        writer.write(line.encode() + b"\n")
        await writer.drain()
        text = await reader.readline()
        if not text:
            raise ConnectionResetError("it closed the connection")
        return _object(text, line.split()[0])

    async def _open(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._address is None:
            raise ConnectionError("no worker was met yet")
        return await asyncio.open_connection(*self._address, limit=CONTROL_LINE_BYTES_MAX)

    async def close(self) -> None:
        if self._streams is not None:
            (_, writer), self._streams = self._streams, None
            writer.close()
            with suppress(OSError):  # it may have broken long ago
                await writer.wait_closed()


def _object(text: bytes, command: str) -> dict[str, Any]:
    """A line of the worker's as a JSON object. Raises RemoteProtocolError."""
    try:
        answer = json.loads(text)
    except ValueError as error:
        raise RemoteProtocolError(f"the worker's answer to {command} is not JSON") from error
    if not isinstance(answer, dict):
        raise RemoteProtocolError(f"the worker's answer to {command} is not an object")
    return answer


def _reported(answer: dict[str, Any]) -> WorkerReported:
    """Memory, heat and state in an answer to mem or a line of watch. Raises RemoteProtocolError."""
    try:
        return WorkerReported(
            thermal=int(answer["thermal"]),
            avail_mb=int(answer["avail_mb"]),
            state=str(answer["state"] if "state" in answer else answer["tail_state"])[:40],
            frozen=msgspec.convert(answer.get("frozen"), FrozenReport | None),
        )
    except (KeyError, TypeError, ValueError) as error:  # msgspec's refusals are ValueErrors
        raise RemoteProtocolError(f"the worker's control channel lacks or breaks {error}") from None


def _silent(error: Exception) -> LinkDownError:
    """Nobody answers on the control channel, in the system's own words."""
    number = error.errno if isinstance(error, OSError) else None
    why = os.strerror(number) if number and number > 0 else str(error) or f"no answer in {ANSWER_S_MAX:g} s"
    return LinkDownError(
        f"the worker's control channel does not answer: {why}; is `outrigger worker` running there?"
    )

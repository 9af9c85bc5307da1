"""The worker's control channel as the bridge uses it: memory and heat in, the host's phase out. Never urgent.

One connection, opened when it is needed and dropped at the first fault; the link does not depend on it.
"""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress
from typing import Any

from common.errors import LinkDownError, RemoteProtocolError
from common.limits import CONTROL_LINE_BYTES_MAX
from common.wire.messages import ShowPhase, WorkerReported

ANSWER_S_MAX = 3.0
UNKNOWN = WorkerReported(thermal=-1, avail_mb=-1, state="unknown")
"""What is reported while the control channel does not answer."""


class ControlClient:
    """Commands to `host`:`port`. One at a time; used by one task at a time or behind its lock."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._lock = asyncio.Lock()
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def report(self) -> WorkerReported:
        """The worker's memory, heat and state. Raises LinkDownError or RemoteProtocolError."""
        answer = await self.ask("mem")
        try:
            return WorkerReported(
                thermal=int(answer["thermal"]),
                avail_mb=int(answer["avail_mb"]),
                state=str(answer.get("state", answer["tail_state"]))[:40],
            )
        except (KeyError, TypeError, ValueError) as error:
            raise RemoteProtocolError(f"the worker's answer to mem lacks or breaks {error}") from None

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
                if isinstance(error, json.JSONDecodeError):
                    raise RemoteProtocolError(
                        f"the worker's answer to {line.split()[0]} is not JSON"
                    ) from error
                raise LinkDownError(f"the worker's control channel does not answer: {error}") from error
            except BaseException:
                await self.close()
                raise

    async def _exchange(self, line: str) -> dict[str, Any]:
        if self._streams is None:
            self._streams = await asyncio.open_connection(
                self._host, self._port, limit=CONTROL_LINE_BYTES_MAX
            )
        reader, writer = self._streams
        writer.write(line.encode() + b"\n")
        await writer.drain()
        text = await reader.readline()
        if not text:
            raise ConnectionResetError("it closed the connection")
        answer = json.loads(text)
        if not isinstance(answer, dict):
            raise RemoteProtocolError(f"the worker's answer to {line.split()[0]} is not an object")
        return answer

    async def close(self) -> None:
        if self._streams is not None:
            (_, writer), self._streams = self._streams, None
            writer.close()
            with suppress(OSError):  # it may have broken long ago
                await writer.wait_closed()

"""One answer to one client: the pieces of a running request as a whole body, or as server-sent events.

Takes pieces from a Trip (trip.py), words them with its Voice (answers.py) and writes them. Called by server.py.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from common.log import get_log
from services.gateway import sse
from services.gateway.failures import error_body
from services.gateway.gather import Gathered, chunks_of
from services.gateway.streams import Broken, Ended, Piece, Reading, Waiting, Wrote
from services.gateway.tally import outcome_of
from services.gateway.trip import Trip

LOOK_EVERY_S = 10.0
"""How long an answer without a stream waits at a time."""
STALL_S_MAX = 60.0
"""How long a client may leave its stream unread before it counts as gone."""

_log = get_log()


@dataclass(slots=True)
class Reply:
    """How to answer one request."""

    trip: Trip
    wants_report: bool
    comment_every_s: float
    """Longest silence of a stream: after it a comment tells how far the read is."""

    async def whole(self) -> dict[str, Any]:
        """The complete body. Raises the request's error when the answer breaks."""
        job = self.trip.job
        gathered = Gathered(job.n_choices, wants_logprobs=job.top_logprobs is not None)
        while True:
            for piece in await self.trip.take(LOOK_EVERY_S):
                gathered.add(piece)
                if isinstance(piece, Ended):
                    return gathered.body(self.trip.voice, piece) | self._report(piece)
                if isinstance(piece, Broken):
                    raise piece.error

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events. Errors after the headers become an error event, which ends the stream without [DONE]."""
        response = web.StreamResponse(headers=sse.HEADERS)
        await response.prepare(request)
        try:
            await self._write_events(response)
        except ConnectionError:
            raise
        except Exception as error:  # the headers are out: an error can only be an event now
            self.trip.tally.outcome = outcome_of(error)
            _log.exception("stream failed")
            await _write(response, sse.event(error_body(error)))
        await response.write_eof()
        return response

    async def _write_events(self, response: web.StreamResponse) -> None:
        voice = self.trip.voice
        openings = [voice.opening(choice) for choice in range(self.trip.job.n_choices)]
        if said := b"".join(sse.event(opening) for opening in openings if opening):
            await _write(response, said)
        progress, written_at = "waiting for the host", time.monotonic()
        last: Piece | None = None
        while not isinstance(last, Ended | Broken):
            pieces = await self.trip.take(written_at + self.comment_every_s - time.monotonic())
            frames: list[bytes] = []
            for last in pieces:
                progress = self._progress(last) or progress
                frames += self._events(last)
            if not frames and time.monotonic() - written_at >= self.comment_every_s:
                frames = [sse.comment(progress)]
            if frames:
                await _write(response, b"".join(frames))
                written_at = time.monotonic()

    def _events(self, piece: Piece) -> list[bytes]:
        """What a piece comes to; the report and the usage go with the last chunks."""
        if isinstance(piece, Broken):
            return [sse.event(error_body(piece.error))]
        chunks = chunks_of(self.trip.voice, piece)
        if not isinstance(piece, Ended):
            return [sse.event(chunk) for chunk in chunks]
        if self.trip.voice.include_usage:
            chunks.append(self.trip.voice.usage_chunk(piece.usage))
        chunks[-1] |= self._report(piece)
        return [*map(sse.event, chunks), sse.DONE]

    def _report(self, last: Ended) -> dict[str, Any]:
        if not self.wants_report:
            return {}
        return {"outrigger": self.trip.report(last)}

    def _progress(self, piece: Piece) -> str | None:
        """What a comment says while nothing else is to send."""
        if isinstance(piece, Waiting):
            return f"waiting, {piece.ahead} requests come first" if piece.ahead else "starting to read"
        if isinstance(piece, Reading):
            done, total = piece.tokens_done, piece.tokens_total
            elapsed_s = self.trip.tally.elapsed_s
            left_s = elapsed_s * (total - done) / max(done, 1)
            return f"read {done} of {total} tokens in {elapsed_s:.0f} s, about {left_s:.0f} s left"
        return "writing" if isinstance(piece, Wrote) else None


async def _write(response: web.StreamResponse, data: bytes) -> None:
    """Writes, and waits for a client that reads slowly; one that stopped reading counts as gone."""
    try:
        async with asyncio.timeout(STALL_S_MAX):
            await response.write(data)
    except TimeoutError:
        raise ConnectionResetError(f"the client has not read its stream for {STALL_S_MAX:.0f} s") from None

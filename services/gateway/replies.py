"""One answer to one client: the pieces of a running request as a whole body, or as server-sent events.

Takes pieces from an Answer (host.py), words them with a Voice (answers.py) and writes them. Called by server.py.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from common.log import get_log
from services.gateway import sse
from services.gateway.answers import Voice, report_body
from services.gateway.failures import error_body
from services.gateway.host import Answer
from services.gateway.streams import Broken, Ended, Piece, Reading, Waiting, Wrote, generated_text
from services.gateway.tally import RequestTally, outcome_of

LOOK_EVERY_S = 10.0
"""How long an answer without a stream waits at a time."""
STALL_S_MAX = 60.0
"""How long a client may leave its stream unread before it counts as gone."""

_log = get_log()


@dataclass(slots=True)
class Reply:
    """How to answer one request."""

    answer: Answer
    voice: Voice
    tally: RequestTally
    seed: int
    wants_report: bool
    comment_every_s: float
    """Longest silence of a stream: after it a comment tells how far the read is."""

    async def whole(self) -> dict[str, Any]:
        """The complete body. Raises the request's error when the answer breaks."""
        texts: list[str] = []
        while True:
            pieces = await self._take(LOOK_EVERY_S)
            texts += generated_text(pieces)
            if pieces and isinstance(last := pieces[-1], Ended):
                return self.voice.whole("".join(texts), last.reason, last.usage) | self._report(last)
            if pieces and isinstance(last, Broken):
                raise last.error

    async def stream(self, request: web.Request) -> web.StreamResponse:
        """Server-sent events. Errors after the headers become an error event, which ends the stream without [DONE]."""
        response = web.StreamResponse(headers=sse.HEADERS)
        await response.prepare(request)
        try:
            await self._write_events(response)
        except ConnectionError:
            raise
        except Exception as error:  # the headers are out: an error can only be an event now
            self.tally.outcome = outcome_of(error)
            _log.exception("stream failed")
            await _write(response, sse.event(error_body(error)))
        await response.write_eof()
        return response

    async def _write_events(self, response: web.StreamResponse) -> None:
        opening = self.voice.opening()
        if opening is not None:
            await _write(response, sse.event(opening))
        progress, written_at = "waiting for the host", time.monotonic()
        last: Piece | None = None
        while not isinstance(last, Ended | Broken):
            pieces = await self._take(written_at + self.comment_every_s - time.monotonic())
            frames = [sse.event(self.voice.piece(text)) for text in generated_text(pieces)]
            for last in pieces:
                progress = self._progress(last) or progress
            if isinstance(last, Ended | Broken):
                frames += self._last_events(last)
            elif not frames and time.monotonic() - written_at >= self.comment_every_s:
                frames = [sse.comment(progress)]
            if frames:
                await _write(response, b"".join(frames))
                written_at = time.monotonic()

    async def _take(self, timeout_s: float) -> list[Piece]:
        pieces = await self.answer.take(timeout_s)
        for piece in pieces:
            match piece:
                case Wrote():
                    self.tally.token()
                case Ended(reason=reason):
                    self.tally.outcome = reason
                case Broken(error=error):
                    self.tally.outcome = outcome_of(error)
        return pieces

    def _last_events(self, last: Ended | Broken) -> list[bytes]:
        if isinstance(last, Broken):
            return [sse.event(error_body(last.error))]
        closing = self.voice.closing(last.reason)
        if not self.voice.include_usage:
            return [sse.event(closing | self._report(last)), sse.DONE]
        usage = self.voice.usage_chunk(last.usage) | self._report(last)
        return [sse.event(closing), sse.event(usage), sse.DONE]

    def _report(self, last: Ended) -> dict[str, Any]:
        if not self.wants_report:
            return {}
        tally = self.tally
        report = report_body(
            last.report, seed=self.seed, first_token_s=tally.first_token_s, total_s=tally.elapsed_s
        )
        return {"outrigger": report}

    def _progress(self, piece: Piece) -> str | None:
        """What a comment says while nothing else is to send."""
        if isinstance(piece, Waiting):
            return f"waiting, {piece.ahead} requests come first" if piece.ahead else "starting to read"
        if isinstance(piece, Reading):
            done, total = piece.tokens_done, piece.tokens_total
            elapsed_s = self.tally.elapsed_s
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

"""The routes: OpenAI's API over HTTP, on asyncio. Thin: a request's trip is trip.py's,
and every decision is taken in the pure files beside it.

GET  /v1/models, /v1/models/{model}
POST /v1/chat/completions, /v1/completions
POST /tokenize, /detokenize
GET  /health        200 only when a token can be computed now
"""

from __future__ import annotations

from dataclasses import dataclass

from aiohttp import web

from common.errors import ServiceError
from common.limits import PROMPT_BYTES_MAX
from services.gateway.doors import answer_errors, guard, json_response, quiet_about_clients, read_body
from services.gateway.failures import error_body, unknown_model
from services.gateway.reading import read_request
from services.gateway.replies import Reply
from services.gateway.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from services.gateway.trip import Trips

BODY_BYTES_MAX = PROMPT_BYTES_MAX + (1 << 20)
ACCEPT_WAIT_S = 0.25
"""How long a stream's headers wait for the host's word, so that a full queue is still a 429 and not an error event."""
REPORT_HEADER = "X-Outrigger-Report"
SHUTDOWN_S = 1.0
"""How long answers under way may take to write their last words when the process stops."""


@dataclass(frozen=True, slots=True)
class Door:
    """What the HTTP side needs to be told."""

    api_key: str | None
    comment_every_s: float
    """Longest silence of a stream."""


class Gateway:
    """The HTTP application, over one host and one model."""

    def __init__(self, door: Door, trips: Trips) -> None:
        self._door = door
        self._trips = trips

    def application(self) -> web.Application:
        """The aiohttp application."""
        guarded = guard(self._door.api_key, open_paths=frozenset({"/health"}))
        app = web.Application(middlewares=[answer_errors, guarded], client_max_size=BODY_BYTES_MAX)
        app.router.add_get("/health", self._health)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/v1/models/{model}", self._model)
        app.router.add_post("/v1/chat/completions", self._chat)
        app.router.add_post("/v1/completions", self._completion)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._detokenize)
        return app

    async def _health(self, _request: web.Request) -> web.Response:
        reason = self._trips.host.why_not()
        if reason is not None:
            body = {"status": "unavailable", "reason": reason} | error_body(ServiceError(reason))
            return json_response(body, 503)
        return json_response(self._trips.status_body())

    async def _models(self, _request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._trips.model_body()]})

    async def _model(self, request: web.Request) -> web.Response:
        name, served = request.match_info["model"], self._trips.prompts.model_name
        if name != served:
            raise unknown_model(name, served)
        return json_response(self._trips.model_body())

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, ChatRequest)

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, CompletionRequest)

    async def _tokenize(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        tokens = await self._trips.tokenize(lambda: read_request(body, TokenizeRequest))
        return json_response({"tokens": tokens})

    async def _detokenize(self, request: web.Request) -> web.Response:
        body = await read_body(request)
        content = await self._trips.detokenize(lambda: read_request(body, DetokenizeRequest))
        return json_response({"content": content})

    async def _generate(self, request: web.Request, kind: type[GenerationRequest]) -> web.StreamResponse:
        body = await read_body(request)
        wants_report = request.headers.get(REPORT_HEADER) == "1"
        async with self._trips.open(kind, lambda: read_request(body, kind)) as trip:
            reply = Reply(trip, wants_report, self._door.comment_every_s)
            if not trip.asked.stream:
                return json_response(await reply.whole())
            await trip.answer.wait(ACCEPT_WAIT_S)
            trip.answer.require_accepted()
            return await reply.stream(request)


async def listen(gateway: Gateway, http_host: str, http_port: int) -> tuple[web.AppRunner, int]:
    """Serves `gateway` on an address; returns what to clean up and the real port. ServiceError when it is taken."""
    runner = web.AppRunner(
        gateway.application(),
        handler_cancellation=True,  # a client that goes away cancels its handler, which cancels its request
        access_log=None,
        logger=quiet_about_clients(),
        shutdown_timeout=SHUTDOWN_S,
    )
    await runner.setup()
    site = web.TCPSite(runner, http_host, http_port)
    try:
        await site.start()
    except OSError as error:
        await runner.cleanup()
        raise ServiceError(
            f"cannot listen on {http_host}:{http_port}: {error.strerror or error}; choose another port "
            f"(OUTRIGGER_HTTP_PORT), or stop what listens there"
        ) from error
    return runner, runner.addresses[0][1]

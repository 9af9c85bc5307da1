"""The routes: OpenAI's API over HTTP, on asyncio. Thin: every decision is taken in the pure files beside it.

GET  /v1/models, /v1/models/{model}
POST /v1/chat/completions, /v1/completions
POST /tokenize, /detokenize
GET  /health        200 only when a token can be computed now
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from aiohttp import web

from common.errors import ServiceError
from common.limits import PROMPT_BYTES_MAX
from common.log import bound
from common.metrics import Metrics
from services.gateway.answers import Voice, model_body
from services.gateway.doors import answer_errors, guard, json_response, read_body
from services.gateway.failures import error_body, unknown_model
from services.gateway.host import HostChannel
from services.gateway.prompt import Job, PromptReader
from services.gateway.reading import read_request
from services.gateway.replies import Reply
from services.gateway.requests import (
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    TokenizeRequest,
)
from services.gateway.tally import RequestTally

BODY_BYTES_MAX = PROMPT_BYTES_MAX + (1 << 20)
ACCEPT_WAIT_S = 0.25
"""How long a stream's headers wait for the host's word, so that a full queue is still a 429 and not an error event."""
T = TypeVar("T")

REPORT_HEADER = "X-Outrigger-Report"
PROMPT_THREADS = 2
SHUTDOWN_S = 1.0
"""How long answers under way may take to write their last words when the process stops."""


@dataclass(frozen=True, slots=True)
class Door:
    """What the HTTP side needs to be told."""

    api_key: str | None
    deadline_s: float
    """Longest life of a request."""
    comment_every_s: float
    """Longest silence of a stream."""


class Gateway:
    """The HTTP application, over one host and one model."""

    def __init__(self, door: Door, prompts: PromptReader, host: HostChannel, metrics: Metrics) -> None:
        self._door = door
        self._prompts = prompts
        self._host = host
        self._metrics = metrics
        self._created = int(time.time())
        self._draining = False
        # Templates and tokenisers of long prompts take seconds; two threads, so that one long prompt delays none.
        self._threads = ThreadPoolExecutor(PROMPT_THREADS, thread_name_prefix="prompt")

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
        reason = self._host.why_not()
        status = self._host.view.status
        if reason is not None or status is None:
            body = {"status": "unavailable", "reason": reason} | error_body(ServiceError(str(reason)))
            return json_response(body, 503)
        worker = {
            "state": status.worker.state,
            "detail": status.worker.detail,
            "device": status.worker.device,
        }
        return json_response(
            {
                "status": "ok",
                "model": self._prompts.model_name,
                "n_ctx": status.n_ctx,
                "requests_running": status.requests_running,
                "requests_waiting": status.requests_waiting,
                "worker": worker | {"split_layer": status.worker.split_layer},
            }
        )

    def _model_body(self) -> dict[str, object]:
        status = self._host.view.status
        return model_body(self._prompts.model_name, self._created, status.n_ctx if status else None)

    async def _models(self, _request: web.Request) -> web.Response:
        return json_response({"object": "list", "data": [self._model_body()]})

    async def _model(self, request: web.Request) -> web.Response:
        name = request.match_info["model"]
        if name != self._prompts.model_name:
            raise unknown_model(name, self._prompts.model_name)
        return json_response(self._model_body())

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, ChatRequest, "chatcmpl-")

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        return await self._generate(request, CompletionRequest, "cmpl-")

    async def _tokenize(self, request: web.Request) -> web.Response:
        asked = read_request(await read_body(request), TokenizeRequest)
        return json_response({"tokens": await self._off_loop(self._prompts.tokenize, asked)})

    async def _detokenize(self, request: web.Request) -> web.Response:
        asked = read_request(await read_body(request), DetokenizeRequest)
        return json_response({"content": await self._off_loop(self._prompts.detokenize, asked)})

    async def _off_loop(self, work: Callable[..., T], *args: object) -> T:
        """Runs what may take seconds on a prompt thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    async def _generate(
        self, request: web.Request, kind: type[GenerationRequest], id_prefix: str
    ) -> web.StreamResponse:
        request_id = id_prefix + secrets.token_hex(12)
        with bound(request_id=request_id), RequestTally(self._metrics) as tally:
            body = await read_body(request)
            asked, job = await self._off_loop(self._prepare, body, kind)
            voice = Voice(
                request_id,
                self._prompts.model_name,
                int(time.time()),
                kind is ChatRequest,
                asked.include_usage,
            )
            wants_report = request.headers.get(REPORT_HEADER) == "1"
            async with await self._host.ask(request_id, job, self._door.deadline_s) as answer:
                reply = Reply(
                    answer, voice, tally, job.sampling.seed, wants_report, self._door.comment_every_s
                )
                if not asked.stream:
                    return json_response(await reply.whole())
                await answer.wait(ACCEPT_WAIT_S)
                answer.require_accepted()
                return await reply.stream(request)

    def _prepare(self, body: bytes, kind: type[GenerationRequest]) -> tuple[GenerationRequest, Job]:
        """From bytes to job; runs on a thread of its own."""
        asked = read_request(body, kind)
        if self._draining:
            raise ServiceError("this server is stopping and takes no more requests")
        n_ctx = self._host.require_ready().n_ctx
        fresh_seed = secrets.randbits(32)
        return asked, self._prompts.job(asked, n_ctx=n_ctx, fresh_seed=fresh_seed)

    async def drain(self, within_s: float) -> None:
        """Takes no more requests and lets those that run come to their end, for at most `within_s`."""
        self._draining = True
        give_up_at = time.monotonic() + within_s
        while len(self._host.table) and time.monotonic() < give_up_at:  # noqa: ASYNC110 (once, for a second)
            await asyncio.sleep(0.02)
        self._host.table.break_all("this server is stopping")

    def close(self) -> None:
        """Ends the prompt threads and frees the vocabulary."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self._prompts.vocabulary.close()


async def listen(gateway: Gateway, http_host: str, http_port: int) -> tuple[web.AppRunner, int]:
    """Serves `gateway` on an address; returns what to clean up and the real port. ServiceError when it is taken."""
    runner = web.AppRunner(
        gateway.application(),
        handler_cancellation=True,  # a client that goes away cancels its handler, which cancels its request
        access_log=None,
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

"""One trip of a request, whichever door it came in by: read, prepared, handed to the host, followed to its end.

HTTP (server.py) and ZeroMQ (public_door.py) bring a body and take pieces away; checks, parameters, tokens, limits,
counting and what is told of a request are here, once. Knows no transport and no client.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from common.errors import ServiceError
from common.log import bound
from common.metrics import Metrics
from services.gateway.answers import Voice, model_body, report_body
from services.gateway.host import Answer, HostChannel
from services.gateway.prompt import Job, PromptReader
from services.gateway.requests import ChatRequest, DetokenizeRequest, GenerationRequest, TokenizeRequest
from services.gateway.streams import Broken, Ended, Piece, Reading, Wrote
from services.gateway.tally import RequestTally, outcome_of

T = TypeVar("T")

PROMPT_THREADS = 2


@dataclass(frozen=True, slots=True)
class Progress:
    """What happened to a request, for whoever watches all of them. Never holds text."""

    stage: str
    """started, reading or ended."""
    request_id: str
    facts: dict[str, Any]


@dataclass(slots=True)
class Trip:
    """A request that the host has. `take` until an Ended or Broken came."""

    request_id: str
    asked: GenerationRequest
    job: Job
    answer: Answer
    voice: Voice
    tally: RequestTally
    watch: Callable[[Progress], None]

    async def take(self, timeout_s: float) -> list[Piece]:
        """What is there, waiting for it up to `timeout_s`; empty after that. Counts it, and gives the host credit."""
        pieces = await self.answer.take(timeout_s)
        for piece in pieces:
            match piece:
                case Wrote():
                    self.tally.token()
                    self.tally.progress("writing")
                case Reading(tokens_done=done, tokens_total=total):
                    self.tally.progress("reading")
                    facts = {"tokens_done": done, "tokens_total": total}
                    self.watch(Progress("reading", self.request_id, facts))
                case Ended(reason=reason):
                    self.tally.outcome = reason
                case Broken(error=error):
                    self.tally.outcome = outcome_of(error)
        return pieces

    def report(self, last: Ended) -> dict[str, Any]:
        """Where the answer was computed, and its seconds."""
        tally = self.tally
        return report_body(
            last.report,
            seed=self.job.sampling.seed,
            first_token_s=tally.first_token_s,
            total_s=tally.elapsed_s,
        )


class Trips:
    """Opens trips, over one host and one model; and what else the doors share."""

    def __init__(
        self,
        prompts: PromptReader,
        host: HostChannel,
        metrics: Metrics,
        deadline_s: float,
        watch: Callable[[Progress], None] = lambda _progress: None,
    ) -> None:
        """`deadline_s`: longest life of a request; `watch` is told of every request's progress."""
        self.prompts = prompts
        self.host = host
        self.watch = watch
        self._metrics = metrics
        self._deadline_s = deadline_s
        self._created = int(time.time())
        self._draining = False
        # Templates and tokenisers of long prompts take seconds; two threads, so that one long prompt delays none.
        self._threads = ThreadPoolExecutor(PROMPT_THREADS, thread_name_prefix="prompt")

    @asynccontextmanager
    async def open(
        self, kind: type[GenerationRequest], read: Callable[[], GenerationRequest]
    ) -> AsyncIterator[Trip]:
        """Hands a request to the host; leaving cancels what still runs. `read` makes it from a body, on a thread.

        Raises RequestError for what cannot be asked, BusyError when too many wait, ServiceError without a host.
        """
        request_id = ("chatcmpl-" if kind is ChatRequest else "cmpl-") + secrets.token_hex(12)
        with bound(request_id=request_id), RequestTally(self._metrics) as tally:
            asked, job = await self.off_loop(self._prepare, read)
            voice = Voice(
                request_id,
                self.prompts.model_name,
                int(time.time()),
                kind is ChatRequest,
                asked.include_usage,
            )
            async with await self.host.ask(request_id, job, self._deadline_s) as answer:
                self.watch(Progress("started", request_id, {"n_prompt": len(job.ids)}))
                try:
                    yield Trip(request_id, asked, job, answer, voice, tally, self.watch)
                except BaseException as error:
                    tally.outcome = outcome_of(error)
                    raise
                finally:
                    facts = {"outcome": tally.outcome, "total_s": tally.elapsed_s}
                    self.watch(Progress("ended", request_id, facts))

    async def tokenize(self, read: Callable[[], TokenizeRequest]) -> list[int]:
        """Token ids of a text. Raises RequestError."""
        return await self.off_loop(lambda: self.prompts.tokenize(read()))

    async def detokenize(self, read: Callable[[], DetokenizeRequest]) -> str:
        """The text of token ids. Raises RequestError."""
        return await self.off_loop(lambda: self.prompts.detokenize(read()))

    def model_body(self) -> dict[str, Any]:
        """The model served."""
        status = self.host.view.status
        return model_body(self.prompts.model_name, self._created, status.n_ctx if status else None)

    def status_body(self) -> dict[str, Any]:
        """How host and worker are. Raises ServiceError with the reason when no token can be computed now."""
        status = self.host.require_ready()
        worker = {
            "state": status.worker.state,
            "detail": status.worker.detail,
            "device": status.worker.device,
        }
        return {
            "status": "ok",
            "model": self.prompts.model_name,
            "n_ctx": status.n_ctx,
            "requests_running": status.requests_running,
            "requests_waiting": status.requests_waiting,
            "worker": worker | {"split_layer": status.worker.split_layer},
        }

    async def off_loop(self, work: Callable[..., T], *args: object) -> T:
        """Runs what may take seconds on a prompt thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, work, *args)

    def _prepare(self, read: Callable[[], GenerationRequest]) -> tuple[GenerationRequest, Job]:
        """From a body to a job; runs on a thread of its own."""
        asked = read()
        if self._draining:
            raise ServiceError("this server is stopping and takes no more requests")
        n_ctx = self.host.require_ready().n_ctx
        fresh_seed = secrets.randbits(32)
        return asked, self.prompts.job(asked, n_ctx=n_ctx, fresh_seed=fresh_seed)

    async def drain(self, within_s: float) -> None:
        """Takes no more requests and lets those that run come to their end, for at most `within_s`."""
        self._draining = True
        give_up_at = time.monotonic() + within_s
        while len(self.host.table) and time.monotonic() < give_up_at:  # noqa: ASYNC110 (once, for a second)
            await asyncio.sleep(0.02)
        self.host.table.break_all("this server is stopping")

    def close(self) -> None:
        """Ends the prompt threads and frees the vocabulary."""
        self._threads.shutdown(wait=True, cancel_futures=True)
        self.prompts.vocabulary.close()

"""A client of the mac process that needs no gateway: it speaks route "generate" itself, in token ids.

Used by benches and by `outrigger verify`. Knows nothing of text or HTTP.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.errors import ServiceError
from common.wire import messages as m
from common.wire.routes import GENERATE
from services.runtime.bus import BlockingAsker
from services.runtime.endpoints import route_endpoint

CREDIT = 1 << 20
"""Benches take every token at once."""
ANSWER_S_MAX = 1200.0
NEVER = -100.0
"""What is added to the logit of a token that should not be chosen."""


@dataclass(frozen=True)
class Answer:
    """What came back for one prompt."""

    token_ids: tuple[int, ...]
    report: m.ReadReport
    first_token_s: float
    """From sending the request to its first token."""
    total_s: float
    logprobs: tuple[float, ...] = ()
    """Of each token, when they were asked for."""


class HostClient:
    """Asks one mac process, which serves in `run_dir`."""

    def __init__(self, run_dir: Path, name: str = "bench") -> None:
        self._asker = BlockingAsker(GENERATE, route_endpoint(run_dir, GENERATE), name=name)
        self.answer_s_max = ANSWER_S_MAX
        """Longest silence of a request."""
        self._names = (f"{name}-{n}" for n in itertools.count())

    def status(self, timeout_s: float = 2.0) -> m.HostStatus | None:
        """The host's status, or None when it does not answer (yet)."""
        try:
            self._asker.send(m.AskStatus(), wait_s=timeout_s)
        except ServiceError:
            return None
        until_s = time.monotonic() + timeout_s
        while (received := self._asker.recv(max(0.0, until_s - time.monotonic()))) is not None:
            if isinstance(received.message, m.HostStatus):
                return received.message
        return None

    def start(
        self,
        prompt: NDArray[np.int32],
        max_tokens: int,
        *,
        turn_end_id: int | None = None,
        top_logprobs: int | None = None,
    ) -> str:
        """Send a greedy request; returns its id. Follow it with `finish`.

        turn_end_id: a token the host is told of as one that ends turns, and that is hardly ever chosen.
        """
        request_id = next(self._names)
        stops = () if turn_end_id is None else (turn_end_id,)
        sampling = m.Sampling(logit_bias=tuple((stop, NEVER) for stop in stops))
        ask = m.Generate(
            request_id,
            len(prompt),
            max_tokens,
            sampling,
            stops,
            ANSWER_S_MAX,
            CREDIT,
            top_logprobs=top_logprobs,
        )
        self._asker.send(ask, np.ascontiguousarray(prompt, np.int32))
        return request_id

    def next_event(self, request_id: str, timeout_s: float | None = None) -> m.Message:
        """The next event of this request. Raises ServiceError when it failed or nothing came (in answer_s_max)."""
        timeout_s = self.answer_s_max if timeout_s is None else timeout_s
        until_s = time.monotonic() + timeout_s
        while (received := self._asker.recv(max(0.0, until_s - time.monotonic()))) is not None:
            message = received.message
            if getattr(message, "request_id", None) != request_id:
                continue
            if isinstance(message, m.Failed):
                raise ServiceError(f"request {request_id} failed: E{message.code} {message.detail}")
            return message
        raise ServiceError(f"request {request_id}: nothing came for {timeout_s:g} s")

    def generate(self, prompt: NDArray[np.int32], max_tokens: int, **how: int | None) -> Answer:
        """Read `prompt` and write max_tokens tokens, greedily. how: as in `start`."""
        started_s = time.monotonic()
        return self.finish(self.start(prompt, max_tokens, **how), started_s)

    def finish(
        self,
        request_id: str,
        started_s: float,
        on_token: Callable[[int, int], None] = lambda _index, _id: None,
    ) -> Answer:
        """Collect a started request to its end. on_token gets the index and id of each token when it comes."""
        token_ids: list[int] = []
        logprobs: list[float] = []
        first_s = 0.0
        while True:
            event = self.next_event(request_id)
            if isinstance(event, m.TokenReady):
                first_s = first_s or time.monotonic() - started_s
                token_ids.append(event.token_id)
                on_token(event.index, event.token_id)
                if event.logprobs is not None:
                    logprobs.append(event.logprobs.logprob)
            elif isinstance(event, m.Finished):
                total_s = time.monotonic() - started_s
                return Answer(tuple(token_ids), event.report, first_s, total_s, tuple(logprobs))

    def close(self) -> None:
        self._asker.close()

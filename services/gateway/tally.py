"""What the gateway counts for Prometheus: first tokens, gaps between tokens, whole requests, and how requests ended.

The series are declared in common.metrics; this file only says when they grow. Intervals are taken here, where both of
their ends happen. Called by trip.py.
"""

from __future__ import annotations

import asyncio
import time
from types import TracebackType

from common.errors import LinkDeadlineError, OutriggerError, RequestError
from common.metrics import Metrics


def outcome_of(error: BaseException) -> str:
    """The outcome label of a request that ended with `error`."""
    if isinstance(error, asyncio.CancelledError | ConnectionError):
        return "cancelled"
    if not isinstance(error, OutriggerError):
        return "error"
    if error.code == LinkDeadlineError.code:
        return "deadline"
    if error.status == 429:
        return "busy"
    return "refused" if isinstance(error, RequestError) or error.status < 500 else "error"


class RequestTally:
    """The times of one request. `with` it around the whole request; counts the outcome when it leaves."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.started_at = time.monotonic()
        self.first_token_s: float | None = None
        """Seconds from arrival to the first token; None before it."""
        self._token_at = 0.0
        self.outcome = "error"

    @property
    def elapsed_s(self) -> float:
        """Seconds since the request arrived."""
        return time.monotonic() - self.started_at

    def token(self) -> None:
        """A token arrived from the host."""
        now = time.monotonic()
        if self.first_token_s is None:
            self.first_token_s = now - self.started_at
            self._metrics.observe("time_to_first_token_seconds", self.first_token_s)
        else:
            self._metrics.observe("inter_token_latency_seconds", now - self._token_at)
        self._token_at = now

    def progress(self, phase: str) -> None:
        """The host got on with it: it read a part of the prompt, or wrote a token."""
        self._metrics.add("host_progress_total", phase=phase)

    def __enter__(self) -> RequestTally:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None:
            self.outcome = outcome_of(error)
        self._metrics.add("requests_total", outcome=self.outcome)
        self._metrics.observe("e2e_request_latency_seconds", self.elapsed_s)

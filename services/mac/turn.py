"""The compute thread's own notes on the request it serves: its read, its logits, its sampler, its times.

Lives from the moment the request is taken to its end. Used by services.mac.compute only.
"""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from common.ggml.sampler import Sampler
from common.wire.messages import ReadReport
from services.mac.read import Read
from services.mac.requests import Request
from services.mac.schedule import RequestView


class Turn:
    """One request's turn on the engine."""

    def __init__(self, request: Request, now_s: float) -> None:
        self.request = request
        self.queue_s = now_s - request.arrived_s
        self.read: Read | None = None
        self.logits: NDArray[np.float32] | None = None
        """f32 [n_vocab] of the newest token that went through the model."""
        self.decode_s = 0.0
        self._report = ReadReport()
        self._sampler: Sampler | None = None

    def view(self, n_ctx: int, now_s: float) -> RequestView:
        """What `next_step` needs to know."""
        request = self.request
        return RequestView(
            n_prompt=len(request.tokens),
            n_ctx=n_ctx,
            max_tokens=request.ask.max_tokens,
            has_logits=self.logits is not None,
            n_generated=len(request.generated),
            credit=request.credit,
            stopped=request.stopped,
            cancelled=request.cancelled,
            expired=now_s >= request.deadline_s,
        )

    def read_done(self) -> ReadReport:
        """Take over what the finished read leaves: the logits of the prompt's last token, and its report."""
        assert self.read is not None and self.read.logits is not None
        self.logits, self._report = self.read.logits, self.read.report()
        return self._report

    def choose(self, n_vocab: int) -> int:
        """The next token's id. Raises EngineError for sampling values that make no sense."""
        assert self.logits is not None
        if self._sampler is None:
            self._sampler = Sampler(self.request.ask.sampling, n_vocab)
        return self._sampler.sample(self.logits)

    def final_report(self) -> ReadReport:
        """The read's report with the times of the whole turn."""
        return msgspec.structs.replace(self._report, queue_s=self.queue_s, decode_s=self.decode_s)

    def close(self) -> None:
        """Give up what is unfinished and free the sampler."""
        if self.read is not None and self.read.logits is None:
            self.read.abandon()
        if self._sampler is not None:
            self._sampler.close()
            self._sampler = None

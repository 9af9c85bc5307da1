"""What the compute thread does next for the request it works on: one pure decision, read from top to bottom.

Knows nothing of engines, sockets or clocks; everything it needs is in the RequestView. Called by
services.mac.compute before every step, so a cancel or a deadline is seen within one ubatch.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Step(Enum):
    """The possible next steps."""

    READ = "read the prompt's next ubatch"
    DECODE = "compute and send one more token"
    WAIT = "wait for credit"
    STOP = "finish: a stop token came"
    LENGTH = "finish: enough tokens, or the context is full"
    CANCELLED = "finish: the client does not want it any more"
    EXPIRED = "fail: the deadline passed"


@dataclass(frozen=True)
class RequestView:
    """All that the decision depends on."""

    n_prompt: int
    n_ctx: int
    max_tokens: int
    has_logits: bool
    """The logits of the last token are known: the prompt is read."""
    n_generated: int
    credit: int
    stopped: bool
    cancelled: bool
    expired: bool


def next_step(view: RequestView) -> Step:
    """Decide. Endings come first, so that nothing is computed for a request that is over."""
    if view.cancelled:
        return Step.CANCELLED
    if view.stopped:
        return Step.STOP
    if view.n_generated >= view.max_tokens:
        return Step.LENGTH
    if view.expired:
        return Step.EXPIRED
    if not view.has_logits:
        return Step.READ
    if view.n_generated and view.n_prompt + view.n_generated > view.n_ctx:
        return Step.LENGTH
    if view.credit <= 0:
        return Step.WAIT
    return Step.DECODE

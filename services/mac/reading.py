"""What the compute thread asks of whoever begins reads, and of a read: two ways to use a worker, one manner.

`services.mac.pairing` and `services.mac.read`: the host holds the whole model, the worker helps. `split_decode` and
`split_read`: the host holds the head layers alone. Nothing but types; used by compute, lane and turn.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from common.wire.messages import Generate, ReadReport
from services.mac.sequence import HeldSequence


class Reading(Protocol):
    """A prompt being read, and what follows it. `logits` f32 [n_vocab] of the newest token; None: not there yet."""

    logits: NDArray[np.float32] | None

    @property
    def tokens_done(self) -> int:
        """Prompt tokens that are through all layers, reused ones included."""

    @property
    def waits(self) -> bool:
        """There is nothing to compute before the worker's next answer."""

    def advance(self, wait_s: float) -> None:
        """Do one small piece of work, or wait for the worker, at most wait_s; call until `logits` is there."""

    def follow(self, sequence: HeldSequence, token_id: int, position: int) -> NDArray[np.float32] | None:
        """The logits after one generated token; None: `advance` until they are there, and ask again."""

    def abandon(self) -> None:
        """Nobody wants this read any more."""

    def report(self) -> ReadReport:
        """Where the tokens were computed and how long it took, so far."""


class Reads(Protocol):
    """Begins the reads of one engine, and uses the time between them."""

    def check(self, ask: Generate) -> None:
        """Raises RequestError for what is not done here."""

    def read(self, sequence: HeldSequence, tokens: NDArray[np.int32], start: int) -> Reading:
        """A read of the prompt `tokens` i32 [n_prompt] from `start` on."""

    def read_alone(self, sequence: HeldSequence, tokens: NDArray[np.int32], start: int) -> Reading:
        """The same in another sequence than the one that the worker mirrors."""

    def use_idle_time(self, sequence: HeldSequence, others: Iterable[HeldSequence]) -> bool:
        """One small thing for later reads; False when there is nothing to do."""

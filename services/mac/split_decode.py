"""Split decode: the host holds the head layers alone, the worker the tail and the output, for every token.

For a model larger than the host. Without the worker nothing can be computed, so a request waits for one that is lost,
for a while, and then fails by name. Owns the span of the link's present life, as services.mac.pairing does where the
worker only helps. Lives on the compute thread, called by services.mac.compute and services.mac.split_read.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import LinkDownError, LinkError, UnsupportedParameterError, WorkerRefusedError
from common.log import get_log
from common.wire.messages import Generate, ReadReport
from services.mac.remote_span import RemoteSpan, ResidualChannel
from services.mac.rows_check import TailRows
from services.mac.sequence import HeldSequence
from services.mac.split_read import SplitRead
from services.mac.tally import Tally
from services.mac.worker import Worker

POLL_S = 0.02

log = get_log()


class SplitDecoding:
    """The worker's part in everything that an engine of the layers [0, worker.split_layer) computes."""

    def __init__(
        self,
        spec: Any,
        n_ctx: int,
        worker: Worker,
        channel: ResidualChannel,
        tally: Tally,
        *,
        wait_s: float,
        on_link_failure: Callable[[LinkError], None] = lambda _error: None,
        on_read: Callable[[ReadReport], None] = lambda _report: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """spec: of the whole model. wait_s: how long a request waits for a worker that is not there.

        on_read is told of each prompt that was read, on_link_failure of each failure at the far end.
        """
        self.clock, self.on_read, self.wait_s = clock, on_read, wait_s
        self._spec, self._n_ctx = spec, n_ctx
        self._worker, self._channel, self._tally = worker, channel, tally
        self._on_link_failure = on_link_failure
        self._tickets = itertools.count(1)
        self._remote: RemoteSpan | None = None
        self._lost_epoch = 0
        """The life of the link that failed last: it is not used again."""

    # --- for the compute thread

    def check(self, ask: Generate) -> None:
        """Raises UnsupportedParameterError for what split decode does not do."""
        if ask.n_choices > 1:
            raise UnsupportedParameterError(
                f"n is {ask.n_choices}; with split decode a request has one answer: ask {ask.n_choices} times",
                param="n",
            )

    def read(self, sequence: HeldSequence, tokens: NDArray[np.int32], start: int) -> SplitRead:
        """A prompt and its answer, from `start` on."""
        return SplitRead(sequence, tokens, start, self)

    read_alone = read  # there is one sequence only

    def use_idle_time(self, sequence: HeldSequence, others: Iterable[HeldSequence]) -> bool:
        """Nothing is done ahead: answers are read again by the turn that needs their rows."""
        return False

    # --- for its reads

    def span_for(self, sequence: HeldSequence) -> RemoteSpan | None:
        """The tail as it can be used now; None while the link is not up.

        Raises WorkerRefusedError when there is a worker that cannot serve, whoever waits.
        """
        link = self._worker.link
        if link.state == "refused":
            raise WorkerRefusedError(f"split decode needs the worker, and it refused: {link.detail}")
        if link.state != "ready" or link.epoch == self._lost_epoch:
            return None
        if 0 < link.n_ctx < self._n_ctx:
            raise WorkerRefusedError(
                f"the worker holds {link.n_ctx} tokens of context and the host {self._n_ctx}: start the worker with "
                f"--worker-ctx {self._n_ctx}, or the host with --n-ctx {link.n_ctx}"
            )
        if self._remote is None or self._remote.link_epoch != link.epoch:
            rows = TailRows(self._spec, self._worker.split_layer, self._spec.n_layer_full)
            self._remote = RemoteSpan(
                self._channel,
                rows,
                link_epoch=link.epoch,
                window=link.window,
                tickets=self._tickets,
                n_vocab=self._spec.n_vocab,
                clock=self.clock,
            )
        sequence.mirror = self._remote.mirror
        return self._remote

    def await_worker(self, waited_s: float, wait_s: float) -> None:
        """Sleep a moment, at most wait_s. waited_s: how long it was so far; LinkDownError when it was too long."""
        if waited_s > self.wait_s:
            link = self._worker.link
            why = f"{link.state}: {link.detail}" if link.detail else link.state
            raise LinkDownError(
                f"split decode needs the worker, and there was none for {self.wait_s:g} s ({why}); "
                "the host holds the first layers only"
            )
        time.sleep(min(wait_s, POLL_S))

    def fell_back(self, sequence: HeldSequence, error: LinkError) -> None:
        """The worker failed: this life of the link is over, the next one begins with an empty mirror."""
        log.warning("worker failed, waiting for it", cause=error.cause, error=str(error))
        if self._remote is not None:
            self._lost_epoch = self._remote.link_epoch
        self._remote, sequence.mirror = None, None
        self._tally.fell_back(error.cause)
        self._on_link_failure(error)

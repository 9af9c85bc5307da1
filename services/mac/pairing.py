"""Host and worker as a pair: begins reads with the worker or without it, and learns from each how to share the next.

Between reads it chooses the split layer from both sides' measured times; before a read it decides whether the worker
is worth it at all; in idle time it brings the worker's mirror up to date. Owns the span of the link's present life.
Lives on the compute thread, called by services.mac.compute only.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import LinkError
from common.limits import UBATCH_TOKENS
from common.log import get_log
from common.wire.messages import Generate, ReadReport
from services.mac.choose import GAIN_MIN, choose_layer, predict, window_for
from services.mac.guard import Guard
from services.mac.mirror import Rewind, tokens_per_push
from services.mac.paces import Paces
from services.mac.plan import ReadPlan, plan_read
from services.mac.read import HEAD, TAIL, Read
from services.mac.remote_span import RemoteSpan, ResidualChannel
from services.mac.rows_check import TailRows
from services.mac.sequence import HeldSequence
from services.mac.tally import Tally
from services.mac.worker import Worker

WORKER_WAIT_S = 0.1
REOPENS_S_MAX = 0.5
OPEN_READS_MAX = 4
"""Reads that may still end; what was given up is forgotten behind them."""
RUNS_TIMED = 2
RETURNED_MIN = 4 * UBATCH_TOKENS
"""Of a read that gives most of its tokens back, so many show that the worker became slow; fewer may be chance."""
UBATCHES_PLANNED = (8, 64)
"""The split layer is chosen for reads as long as the last one, within these bounds."""

log = get_log()


class Pairing:
    """The worker's part in the reads of one engine."""

    def __init__(
        self,
        engine: Any,
        worker: Worker,
        channel: ResidualChannel | None,
        tally: Tally,
        *,
        split_tokens_min: int,
        guarded: bool = True,
        layer_pinned: bool = True,
        on_link_failure: Callable[[LinkError], None] = lambda _error: None,
        on_split_layer: Callable[[int], None] = lambda _layer: None,
        on_read: Callable[[ReadReport], None] = lambda _report: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """guarded: a read leaves a worker that does not make it faster. layer_pinned: the split layer stays.

        on_split_layer is told of another split layer, for which the link is to be opened anew; on_read of each read.
        """
        self._spec, self._worker, self._channel, self._tally = engine.spec, worker, channel, tally
        self._split_tokens_min, self._guarded, self._layer_pinned = split_tokens_min, guarded, layer_pinned
        self._on_link_failure, self._on_split_layer, self._on_read = on_link_failure, on_split_layer, on_read
        self._clock = clock
        self._tickets = itertools.count(1)
        self._remote: RemoteSpan | None = None
        self._mirrored: HeldSequence | None = None
        """The sequence whose rows the mirror holds."""
        self.paces = Paces(self._spec.n_layer_full)
        self._device = ""
        self._timed_epoch = 0
        """The life of the link whose timing at the beginning was taken in last."""
        self._n_timed = 0
        """Ubatches run for their time alone."""
        self._slow_at: float | None = None
        """When the worker was found to be too slow for a read, by its pace or in the middle of one."""
        self._reopening = False
        self._open: list[Read] = []
        self._n_ubatches = self._position = 0
        """Of the last read that might have been split."""

    # --- reads

    def check(self, ask: Generate) -> None:
        """Everything that can be asked is served."""

    def read(self, sequence: HeldSequence, tokens: NDArray[np.int32], start: int) -> Read:
        """A read of `tokens` from `start` on: with the worker when it stands ready and is worth it."""
        self.review()
        self._await_reopening()
        self._hear_link()
        standing = self._worker.standing
        remote = self._span_for(sequence) if standing == "ready" else None
        plan = plan_read(
            start,
            len(tokens),
            worker=standing,
            split_tokens_min=self._split_tokens_min,
            split_end=sequence.split_end,
        )
        guard = None
        if plan.n_remote and remote and self._guarded:
            plan, guard = self._judged(plan, remote)
        return self._opened(
            Read(sequence, tokens, plan, remote, guard=guard, on_fallback=self.fell_back, clock=self._clock)
        )

    def read_alone(self, sequence: HeldSequence, tokens: NDArray[np.int32], start: int) -> Read:
        """A read on the host alone: the worker's mirror belongs to another sequence."""
        plan = plan_read(start, len(tokens), worker=self._worker.standing, split_tokens_min=len(tokens) + 1)
        return self._opened(Read(sequence, tokens, plan, None, clock=self._clock))

    def review(self) -> None:
        """Learn from the reads that have ended."""
        for read in [read for read in self._open if read.logits is not None]:
            self._open.remove(read)
            report = read.report()
            if self._worker.split_layer:
                self.paces.learn(report, self._worker.split_layer)
            if report.tokens_returned:
                log.info("worker too slow, rest read on the host", tokens=report.tokens_returned)
                self._tally.returned()
            if report.tokens_returned >= max(RETURNED_MIN, report.tokens_worker) and self._slow_at is None:
                self._slow_at = self._clock()
            self._on_read(report)

    def fell_back(self, error: LinkError) -> None:
        """The worker failed in the middle of a read, or while its mirror was brought up to date."""
        log.warning("worker failed, the host goes on alone", cause=error.cause, error=str(error))
        self._worker.failed()
        self._drop_span()
        self._tally.fell_back(error.cause)
        self._on_link_failure(error)

    # --- idle time

    def use_idle_time(self, sequence: HeldSequence, others: Iterable[HeldSequence]) -> bool:
        """One small thing for later reads of `sequence`; False when there is nothing to do. others: cut alike."""
        self.review()
        if self._worker.standing != "ready":
            return False
        self._hear_link()
        if self._time_host(sequence):
            return True
        if self._recut([sequence, *others]):
            return False  # the link is being opened anew
        try:
            return self._update_mirror(sequence)
        except LinkError as error:
            self.fell_back(error)
        except Exception:
            log.exception("the worker's mirror could not be brought up to date")
            self._worker.failed()
            self._drop_span()
        return False

    def _hear_link(self) -> None:
        """Take in what the bridge measured of this life of the link; another worker is another pace."""
        link = self._worker.link
        if self._worker.standing != "ready" or link.epoch == self._timed_epoch:
            return
        self._timed_epoch = link.epoch
        if link.device != self._device:
            self._device, self._slow_at = link.device, None
            self.paces.forget_worker()
        if link.token_ms and not self.paces.worker_known:
            n_tail = self._spec.n_layer_full - self._worker.split_layer
            self.paces.learn_link(link.token_ms, link.rtt_us, n_tail)

    def _time_host(self, sequence: HeldSequence) -> bool:
        """Before anything is held, run the head layers over one ubatch for its time alone; False when that is done.

        So the first read is planned from times of both sides. The first run may build graphs and map weights; the
        second counts.
        """
        if self.paces.host_known or sequence.n_canonical or sequence.n_provisional:
            return False
        sequence.forget()
        head, started_s = sequence.parts[HEAD], self._clock()
        head.run(np.zeros(UBATCH_TOKENS, np.int32), 0)
        seconds = self._clock() - started_s
        sequence.forget()
        self._n_timed += 1
        if self._n_timed >= RUNS_TIMED:
            self.paces.learn_host(0, seconds, head.last)
            log.info("host timed", ubatch_ms=round(1000 * seconds, 1), layers=head.last)
        return True

    def _recut(self, sequences: list[HeldSequence]) -> bool:
        """Move the split layer to where both sides' times say it is best."""
        worker = self._worker
        if self._layer_pinned or not self.paces.known or (self._remote and self._remote.n_in_flight):
            return False
        least, most = UBATCHES_PLANNED
        n_ubatches = min(most, max(least, self._n_ubatches))
        layers = range(max(1, worker.link.layer_min), self._spec.n_layer_full)
        choice = choose_layer(
            layers,
            n_ubatches,
            lambda layer: self.paces.times(layer, self._position),
            current=worker.split_layer,
        )
        if choice.layer == worker.split_layer:
            return False
        log.info(
            "split layer chosen from measured times",
            layer=choice.layer,
            before=worker.split_layer,
            gain=round(choice.gain, 3),
        )
        for sequence in sequences:
            sequence.recut(choice.layer)
        worker.reopens(choice.layer)
        self._slow_at = None if choice.gain >= GAIN_MIN else self._slow_at
        self._drop_span()
        self._reopening = True
        self._on_split_layer(choice.layer)
        return True

    def _update_mirror(self, sequence: HeldSequence) -> bool:
        """One push of canonical rows that the worker lacks, or a short wait for the last one."""
        remote = self._remote
        if remote is None or self._mirrored is not sequence or remote.link_epoch != self._worker.link.epoch:
            return False
        if remote.n_in_flight:
            remote.wait(WORKER_WAIT_S)
            return True
        if sequence.holding is not None and sequence.holding.group_released:
            return False  # old rows are not in memory; a read that needs the mirror goes back below the limit first
        tail, end = sequence.parts[TAIL], sequence.n_canonical
        if remote.rows.has_recurrent and tail.n_valid != end:
            return False  # its states stand elsewhere; the next read brings rows and states together
        one = tail.export_rows(0, 1, kv=True, state=False) if end else []
        sync = remote.mirror.next_sync(end, tokens_per_push(sum(section.n_bytes for section in one)))
        if sync is None:
            return False
        if isinstance(sync, Rewind):
            remote.start_rewind(sync.n)
            return True
        rows = tail.export_rows(sync.p0, sync.p1, kv=True, state=sync.with_state)
        remote.start_push(rows, sync.p1, with_state=sync.with_state)
        return True

    def _await_reopening(self) -> None:
        """Another split layer was chosen a moment ago: the link is back before a read could begin without it."""
        until_s = self._clock() + REOPENS_S_MAX
        while self._reopening and self._worker.link.state == "connecting" and self._clock() < until_s:
            time.sleep(REOPENS_S_MAX / 100)
        self._reopening = False

    # --- inside

    def _opened(self, read: Read) -> Read:
        self._open = [*self._open[1 - OPEN_READS_MAX :], read]
        return read

    def _judged(self, plan: ReadPlan, remote: RemoteSpan) -> tuple[ReadPlan, Guard | None]:
        """The plan as measured times would have it, and who watches over it."""
        layer, n_layer = self._worker.split_layer, self._spec.n_layer_full
        self._n_ubatches, self._position = len(plan.ubatches), (plan.start + plan.end) // 2
        times = self.paces.times(layer, self._position) if self.paces.known else None
        now = self._clock()
        if times and self._slow_at is None and predict(layer, len(plan.ubatches), times).gain < GAIN_MIN:
            self._slow_at = now
        if self._slow_at is not None:
            if now - self._slow_at < self._worker.rest_s:
                return replace(plan, n_remote=0, bypass_reason="slow"), None
            log.info("worker was too slow and is tried again", rested_s=round(now - self._slow_at))
            times = None
            self.paces.forget_worker()
        self._slow_at = None
        if times:
            remote.window = window_for(times, self._worker.link.window)
        guard = Guard(len(plan.ubatches), (n_layer - layer) / layer, times, self._clock)
        return plan, guard

    def _span_for(self, sequence: HeldSequence) -> RemoteSpan:
        """The span of the link as it is now; a new life of the link is a new span with an unknown mirror."""
        link, split_layer = self._worker.link, self._worker.split_layer
        if self._remote is None or self._remote.link_epoch != link.epoch:
            assert self._channel is not None, "a split layer needs a residual channel"
            rows = TailRows(self._spec, split_layer, self._spec.n_layer_full)
            self._remote = RemoteSpan(
                self._channel, rows, link_epoch=link.epoch, window=link.window, tickets=self._tickets
            )
            self._mirrored, sequence.mirror = sequence, self._remote.mirror
        return self._remote

    def _drop_span(self) -> None:
        self._remote = None
        if self._mirrored is not None:
            self._mirrored.mirror = None
            self._mirrored = None

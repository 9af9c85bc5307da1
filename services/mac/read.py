"""One read: the new tokens of a prompt through all layers, in ubatches, on the host alone or with the worker.

With the worker, the host runs the head layers of ubatch i, sends the residual and turns to ubatch i+1 at once; rows
come home with the answers and go into the host's own tail layers; the last ubatch stays on the host. Whatever goes
wrong at the far end undoes the whole read and runs it again on the host alone: same ubatches, same bits.

`advance` does one small piece of work (one span over one ubatch, or a short wait), so that whoever calls it can look
at cancels, deadlines and its own heartbeat in between. Called by services.mac.compute on the compute thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import EngineError, LinkError
from common.log import get_log
from common.wire.messages import ReadReport
from services.mac.grid import Ubatch
from services.mac.mirror import Rewind, tokens_per_push
from services.mac.plan import ReadPlan, plan_without_worker
from services.mac.remote_span import RemoteSpan, TailRan
from services.mac.sequence import HeldSequence
from services.mac.stopwatch import ReadClock

HEAD, TAIL = 0, 1

log = get_log()


class Read:
    """Reads `tokens` i32 [n_prompt] from plan.start on. `logits` is f32 [n_vocab] once the last ubatch is through."""

    def __init__(
        self,
        sequence: HeldSequence,
        tokens: NDArray[np.int32],
        plan: ReadPlan,
        remote: RemoteSpan | None,
        *,
        on_fallback: Callable[[LinkError], None] = lambda _error: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """remote: needed when plan.n_remote > 0. on_fallback is told of the failure before the read is redone."""
        self.sequence, self.tokens, self.plan = sequence, tokens, plan
        self.logits: NDArray[np.float32] | None = None
        self.fallbacks: list[str] = []
        self._remote = remote if plan.n_remote else None
        self._on_fallback = on_fallback
        self._clock = ReadClock(clock)
        self._next = 0
        """Index of the next ubatch whose head layers (alone: all layers) run."""
        self._residual: NDArray[np.float32] | None = None
        """Residual of ubatch _next - 1, computed and not yet used: waits for the window, or for the worker's end."""
        self._n_home = 0
        """Ubatches whose rows the host's own tail layers have."""

    @property
    def tokens_done(self) -> int:
        """Prompt tokens that are through all layers, reused ones included."""
        done = self._next if self._remote is None else self._n_home
        if self.logits is not None:
            return self.plan.end
        return self.plan.ubatches[done].position

    @property
    def waits(self) -> bool:
        """There is nothing to compute before the worker's next answer."""
        remote = self._remote
        if remote is None or not remote.n_in_flight:
            return False
        if self._next == 0:
            return True  # the mirror is on its way to where the read starts
        if self._residual is None:
            return False
        return self._next > self.plan.n_remote or remote.n_in_flight >= remote.window

    def advance(self, wait_s: float) -> None:
        """Do the next piece of work; call until `logits` is there. LinkErrors are dealt with here.

        wait_s: how long to wait for the worker when there is nothing else to do.
        """
        if self._remote is None:
            self._run_alone()
            return
        try:
            self._advance_split(self._remote, wait_s)
        except LinkError as error:
            self._fall_back(self._remote, error)

    def abandon(self) -> None:
        """Nobody wants this read any more: the worker is told so, and answers still in flight will be dropped."""
        if self._remote is not None:
            try:
                self._remote.cancel()
            except LinkError as error:
                log.info("worker could not be told of a cancelled read", error=str(error))

    def report(self) -> ReadReport:
        """Where the tokens were computed and how long it took, so far."""
        n_worker = self.plan.tokens_worker
        return ReadReport(
            tokens_cache=self.plan.start,
            tokens_host=self.plan.end - self.plan.start - n_worker,
            tokens_worker=n_worker,
            split_layer=self.sequence.parts[TAIL].first if n_worker else 0,
            bypass_reason=self.plan.bypass_reason,
            fallbacks=tuple(self.fallbacks),
            prefill_s=self._clock.elapsed_s,
            wait_s=self._clock.wait_s,
            stages=self._clock.stages(),
        )

    # --- on the host alone

    def _run_alone(self) -> None:
        ubatch, is_last = self._take_next()
        with self._clock.head(ubatch):
            out = self._run(self.sequence.whole, ubatch, "last" if is_last else "none")
        for part in range(len(self.sequence.parts)):
            self.sequence.note(part, ubatch.end)
        if is_last:
            self.logits = out[-1]

    # --- with the worker

    def _advance_split(self, remote: RemoteSpan, wait_s: float) -> None:
        if self._next == 0 and not self._synced(remote, wait_s):
            return
        if self._residual is None:
            self._run_head()
        elif self._next <= self.plan.n_remote:
            if remote.n_in_flight < remote.window:
                self._send(remote)
            else:
                self._take_home(remote, wait_s)
        elif remote.n_in_flight:
            self._take_home(remote, wait_s)
        else:
            self._run_last_tail()

    def _synced(self, remote: RemoteSpan, wait_s: float) -> bool:
        """One step towards a mirror that stands where the read starts; True when it does."""
        if remote.n_in_flight:
            with self._clock.waiting():
                remote.wait(wait_s)
            return False
        sync = remote.mirror.next_sync(self.plan.start, self._tokens_per_push())
        if sync is None:
            return True
        if isinstance(sync, Rewind):
            remote.start_rewind(sync.n)
        else:
            rows = self.sequence.parts[TAIL].export_rows(sync.p0, sync.p1, kv=True, state=sync.with_state)
            remote.start_push(rows, sync.p1, with_state=sync.with_state)
        return False

    def _run_head(self) -> None:
        ubatch, _ = self._take_next()
        with self._clock.head(ubatch):
            self._residual = self._run(self.sequence.parts[HEAD], ubatch, "none")
        self.sequence.note(HEAD, ubatch.end)

    def _send(self, remote: RemoteSpan) -> None:
        """Send the residual at hand; take home what is there already without waiting."""
        assert self._residual is not None
        ubatch = self.plan.ubatches[self._next - 1]
        is_last_remote = self._next == self.plan.n_remote
        want_state = remote.rows.has_recurrent and (is_last_remote or self.sequence.wants_state(ubatch.end))
        remote.start_run(self._residual, ubatch.position, want_state=want_state)
        self._residual = None
        while self._take_home(remote, 0.0):
            pass

    def _take_home(self, remote: RemoteSpan, wait_s: float) -> bool:
        """Import the next answer's rows into the host's own tail layers; False when none came."""
        with self._clock.waiting():
            answer = remote.wait(wait_s)
        if answer is None:
            return False
        assert isinstance(answer, TailRan), "the mirror is in place before the first chunk"
        with self._clock.taken_home(self._n_home, answer):
            self._import(answer)
        if answer.has_state or not remote.rows.has_recurrent:
            self.sequence.note(TAIL, answer.end)
        self._n_home += 1
        return True

    def _import(self, answer: TailRan) -> None:
        """Rows of a type or size that is not ours are the worker's failure, not the request's."""
        try:
            self.sequence.take_tail_rows(answer.sections, answer.end, has_state=answer.has_state)
        except EngineError as error:
            raise LinkError(f"rows of the worker do not fit here: {error}", cause="damaged") from error

    def _run_last_tail(self) -> None:
        ubatch, residual = self.plan.ubatches[-1], self._residual
        with self._clock.tail(len(self.plan.ubatches) - 1):
            out = self.sequence.parts[TAIL].run(residual, ubatch.position, logits="last")
        self.sequence.note(TAIL, ubatch.end)
        self.logits = out[-1]

    # --- both

    def _take_next(self) -> tuple[Ubatch, bool]:
        ubatch = self.plan.ubatches[self._next]
        self._next += 1
        return ubatch, self._next == len(self.plan.ubatches)

    def _run(self, span: Any, ubatch: Ubatch, logits: str) -> NDArray[np.float32]:
        return span.run(self.tokens[ubatch.position : ubatch.end], ubatch.position, logits=logits)

    def _fall_back(self, remote: RemoteSpan, error: LinkError) -> None:
        """Undo everything this read did and begin again without the worker."""
        remote.abandon()
        self._on_fallback(error)
        self.fallbacks.append(error.cause)
        self.sequence.restore(self.plan.start)
        self.plan = plan_without_worker(self.plan)
        self._remote, self._residual, self._next, self._n_home = None, None, 0, 0
        self._clock.restart()

    def _tokens_per_push(self) -> int:
        if self.plan.start == 0:
            return tokens_per_push(1)
        one = self.sequence.parts[TAIL].export_rows(0, 1, kv=True, state=False)
        return tokens_per_push(sum(section.n_bytes for section in one))

"""One read: the new tokens of a prompt through all layers, in ubatches, on the host alone or with the worker.

With the worker, the host runs the head layers of ubatch i, sends the residual and turns to ubatch i+1 at once; rows
come home with the answers and go into the host's own tail layers; the last ubatch stays on the host. Heads run ahead
whenever there is nothing better to do: while the mirror is brought up to date, while the window is full. Residuals
are kept until the host's own tail layers stand behind them, so that whatever happens at the far end, the host goes on
from there: a worker that became too slow or was lost costs no head layer twice. What came from a worker that answers
wrongly is not believed: then the whole read is undone and run again, same ubatches, same bits.

`advance` does one small piece of work (one span over one ubatch, or a short wait), so that whoever calls it can look
at cancels, deadlines and its own heartbeat in between. Called by services.mac.compute on the compute thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from common.errors import EngineError, LinkError
from common.limits import MIB
from common.log import get_log
from common.wire.messages import ReadReport
from common.wire.rows import RowSection
from services.mac.guard import Guard
from services.mac.mirror import Rewind, tokens_per_push
from services.mac.plan import ReadPlan, plan_without_worker
from services.mac.remote_span import MirrorMoved, RemoteSpan, TailRan
from services.mac.sequence import HeldSequence
from services.mac.stopwatch import ReadClock

HEAD, TAIL = 0, 1
KEPT_BYTES_MAX = 128 * MIB
"""Residuals kept by a read. A hybrid's states come home often enough that this suffices for a read of any length."""
BELIEVED = ("down", "deadline", "stale_epoch", "busy", "memory", "suspended")
"""Causes of failure that cast no doubt on what the worker answered before."""

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
        guard: Guard | None = None,
        on_fallback: Callable[[LinkError], None] = lambda _error: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """remote: needed when plan.n_remote > 0. on_fallback is told of the failure before the host goes on alone.

        guard: decides whether the worker stays worth waiting for; without one the plan is carried out.
        """
        self.sequence, self.tokens, self.plan = sequence, tokens, plan
        self.logits: NDArray[np.float32] | None = None
        self.fallbacks: list[str] = []
        self.tokens_returned = 0
        self._remote = remote if plan.n_remote else None
        self._guard, self._on_fallback = guard, on_fallback
        self._clock = ReadClock(clock)
        self._in_place = False
        """The worker's mirror stands where the read starts."""
        self._n_heads = self._n_sent = self._n_tails = 0
        """Ubatches through the head layers; sent to the worker; through the tail layers, rows home included."""
        self._kept: dict[int, NDArray[np.float32]] = {}
        """Residuals by ubatch that the host's own tail layers may still need."""
        self._state_at = 0
        """Ubatches behind which the worker's recurrent state was last asked for."""

    # --- for the caller

    @property
    def tokens_done(self) -> int:
        """Prompt tokens that are through all layers, reused ones included."""
        if self.logits is not None:
            return self.plan.end
        return self.plan.ubatches[self._n_tails].position

    @property
    def waits(self) -> bool:
        """There is nothing to compute before the worker's next answer."""
        remote = self._remote
        return remote is not None and bool(remote.n_in_flight) and not self._head_may_run

    def advance(self, wait_s: float) -> None:
        """Do the next piece of work; call until `logits` is there. LinkErrors are dealt with here.

        wait_s: how long to wait for the worker when there is nothing else to do.
        """
        remote = self._remote
        if remote is None:
            self._run_here()
            return
        try:
            self._advance_split(remote, wait_s)
        except LinkError as error:
            self._lose(remote, error)

    def follow(self, sequence: HeldSequence, token_id: int, position: int) -> NDArray[np.float32]:
        """The logits f32 [n_vocab] after one generated token; `sequence` is where the prompt's rows are by now."""
        return sequence.decode(token_id, position)

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
            tokens_returned=self.tokens_returned,
            prefill_s=self._clock.elapsed_s,
            wait_s=self._clock.wait_s,
            stages=self._clock.stages(),
        )

    # --- with the worker

    def _advance_split(self, remote: RemoteSpan, wait_s: float) -> None:
        while remote.n_in_flight and self._take(remote, 0.0):
            pass
        if not self._in_place and not remote.n_in_flight:
            self._move_mirror(remote)
        if self._in_place:
            self._send_ready(remote)
        if self._head_may_run:
            self._run_head()
        elif remote.n_in_flight:
            if self._worth_waiting():
                self._take(remote, wait_s)
            else:
                remote.cancel()
                self._go_on_here(self._n_standing)
        elif self._in_place and self._n_sent == self.plan.n_remote:
            self._remote = None

    @property
    def _head_may_run(self) -> bool:
        """There are head layers to run and room for their residual, and the worker's part is not over."""
        return (
            self._n_heads < len(self.plan.ubatches)
            and len(self._kept) < self._n_kept_max
            and not self._worker_is_through
        )

    @property
    def _worker_is_through(self) -> bool:
        remote = self._remote
        return remote is None or (
            self._in_place and self._n_sent == self.plan.n_remote and not remote.n_in_flight
        )

    def _move_mirror(self, remote: RemoteSpan) -> None:
        """One step towards a mirror that stands where the read starts."""
        sync = remote.mirror.next_sync(self.plan.start, self._tokens_per_push())
        if sync is None:
            self._in_place = True
        elif isinstance(sync, Rewind):
            remote.start_rewind(sync.n)
        else:
            rows = self.sequence.parts[TAIL].export_rows(sync.p0, sync.p1, kv=True, state=sync.with_state)
            remote.start_push(rows, sync.p1, with_state=sync.with_state)
        if self._guard and sync is not None:
            self._guard.asked_to_sync()

    def _send_ready(self, remote: RemoteSpan) -> None:
        """Send the residuals at hand as far as the window goes, unless the guard wants them to stay."""
        while self._n_sent < min(self._n_heads, self.plan.n_remote) and remote.n_in_flight < remote.window:
            if self._guard:
                n_more = self._guard.n_more(*self._left())
                if self._n_sent + n_more < self.plan.n_remote:
                    self._give_no_more_than(self._n_sent + n_more)
                    if not n_more:
                        self._fetch_state(remote)
                        return
            self._send(remote)

    def _send(self, remote: RemoteSpan) -> None:
        index = self._n_sent
        ubatch = self.plan.ubatches[index]
        want_state = remote.rows.has_recurrent and (
            index + 1 == self.plan.n_remote
            or self.sequence.wants_state(ubatch.end)
            or index + 1 - self._state_at >= self._n_kept_max // 2
        )
        self._clock.sent(index)
        remote.start_run(self._kept[index], ubatch.position, want_state=want_state)
        if self._guard:
            self._guard.sent()
        self._state_at = index + 1 if want_state else self._state_at
        self._n_sent += 1

    def _give_no_more_than(self, n_remote: int) -> None:
        self.tokens_returned += sum(
            ubatch.n_tokens for ubatch in self.plan.ubatches[n_remote : self.plan.n_remote]
        )
        reason = self.plan.bypass_reason if n_remote else "slow"
        self.plan = replace(self.plan, n_remote=n_remote, bypass_reason=reason)

    def _fetch_state(self, remote: RemoteSpan) -> None:
        """The last chunk is out already: the recurrent state behind it comes by itself."""
        if remote.rows.has_recurrent and self._state_at < self._n_sent:
            remote.start_pull_state(self.plan.ubatches[self._n_sent - 1].end)
            self._state_at = self._n_sent

    def _take(self, remote: RemoteSpan, wait_s: float) -> bool:
        """Take the next answer and what it brings; False when none came."""
        with self._clock.waiting():
            answer = remote.wait(wait_s)
        if answer is None:
            return False
        if isinstance(answer, MirrorMoved):
            return True
        if isinstance(answer, TailRan):
            with self._clock.taken_home(self._n_tails, answer) as imported:
                self._import(answer.sections, answer.end, has_state=answer.has_state)
            if self._guard:
                self._guard.came_home(answer, imported.seconds)
            self._n_tails += 1
            whole = answer.has_state or not remote.rows.has_recurrent
        else:
            self._import(answer.sections, answer.end, has_state=True)
            whole = True
        if whole:
            self.sequence.note(TAIL, answer.end)
            self._kept = {index: rows for index, rows in self._kept.items() if index >= self._n_tails}
        return True

    def _import(self, sections: Sequence[RowSection], end: int, *, has_state: bool) -> None:
        """Rows of a type or size that is not ours are the worker's failure, not the request's."""
        try:
            self.sequence.take_tail_rows(sections, end, has_state=has_state)
        except EngineError as error:
            raise LinkError(f"rows of the worker do not fit here: {error}", cause="damaged") from error

    def _worth_waiting(self) -> bool:
        if self._guard is None:
            return True
        n_redone = self._n_tails - self._n_standing
        spent_s = self._clock.work_s + self._clock.wait_s
        return not self._guard.gives_up(*self._left(), n_redone, spent_s)

    def _left(self) -> tuple[int, int]:
        """Ubatches without a head, and those through it that were not sent."""
        return len(self.plan.ubatches) - self._n_heads, self._n_heads - self._n_sent

    # --- when the worker is lost

    @property
    def _n_standing(self) -> int:
        """Ubatches that all of the host's own tail layers have."""
        n_valid = self.sequence.parts[TAIL].n_valid
        return sum(ubatch.end <= n_valid for ubatch in self.plan.ubatches)

    def _go_on_here(self, n_tails: int) -> None:
        """The worker's part ends with the first n_tails ubatches, behind which our own tail layers stand."""
        tail = self.sequence.parts[TAIL]
        tail.truncate(tail.n_valid)  # of a hybrid, attention layers may have run ahead of their states
        self._give_no_more_than(n_tails)
        for index in range(n_tails, self._n_heads):
            self._clock.returned(index)
        self._remote, self._n_tails, self._n_sent = None, n_tails, n_tails

    def _lose(self, remote: RemoteSpan, error: LinkError) -> None:
        """The worker failed: go on alone from what is certain, which may be the beginning."""
        remote.abandon()
        self._on_fallback(error)
        self.fallbacks.append(error.cause)
        returned = self.tokens_returned
        if error.cause in BELIEVED:
            self._go_on_here(self._n_standing)
        else:
            self.sequence.restore(self.plan.start)
            self._n_heads = self._n_tails = self._n_sent = 0
            self._kept.clear()
            self._clock.restart()
            self._remote = None
            self._give_no_more_than(0)
        self.tokens_returned = returned  # lost is not slow
        if not self.plan.n_remote:
            self.plan = plan_without_worker(self.plan)

    # --- on the host

    def _run_here(self) -> None:
        """The next ubatch through the layers it has not seen; the worker has no more part in it."""
        index = self._n_tails
        ubatch = self.plan.ubatches[index]
        following = self.plan.ubatches[index + 1 : index + 2]
        if index >= self._n_heads and following and self.sequence.runs_pair(ubatch, *following):
            self._run_pair(index)
            return
        wanted = "last" if index + 1 == len(self.plan.ubatches) else "none"
        if index < self._n_heads:
            with self._clock.tail(index):
                out = self.sequence.parts[TAIL].run(self._kept.pop(index), ubatch.position, logits=wanted)
        else:
            with self._clock.head(ubatch):
                out = self._run(self.sequence.whole, index, wanted)
            self._n_heads += 1
            if len(self.sequence.parts) > 1:
                self.sequence.note(HEAD, ubatch.end)
        self.sequence.note(len(self.sequence.parts) - 1, ubatch.end)
        self._n_tails += 1
        if wanted == "last":
            self.logits = out[-1]
            self._clock.stop()

    def _run_pair(self, index: int) -> None:
        """Two ubatches through all layers, staggered; the clock has them as one."""
        first, second = self.plan.ubatches[index : index + 2]
        wanted = "last" if index + 2 == len(self.plan.ubatches) else "none"
        with self._clock.head(second):
            rows = self.tokens[first.position : second.end]
            out = self.sequence.whole.run_pair(rows, first.position, logits=wanted)
        for part in range(len(self.sequence.parts)):
            self.sequence.note(part, second.end)
        self._n_heads, self._n_tails = index + 2, index + 2
        if wanted == "last":
            self.logits = out[-1]
            self._clock.stop()

    def _run_head(self) -> None:
        index = self._n_heads
        with self._clock.head(self.plan.ubatches[index]) as ran:
            self._kept[index] = self._run(self.sequence.parts[HEAD], index, "none")
        if self._guard:
            self._guard.head_ran(ran.seconds)
        self.sequence.note(HEAD, self.plan.ubatches[index].end)
        self._n_heads += 1

    def _run(self, span: Any, index: int, logits: str) -> NDArray[np.float32]:
        ubatch = self.plan.ubatches[index]
        return span.run(self.tokens[ubatch.position : ubatch.end], ubatch.position, logits=logits)

    # --- sizes

    @property
    def _n_kept_max(self) -> int:
        """Residuals that may be kept; always enough for the window and the way between two states."""
        bytes_each = 4 * self.sequence.spec.n_embd * self.plan.ubatches[0].n_tokens
        window = self._remote.window if self._remote else 1
        return max(2 * window + 2, KEPT_BYTES_MAX // bytes_each)

    def _tokens_per_push(self) -> int:
        if self.plan.start == 0:
            return tokens_per_push(1)
        one = self.sequence.parts[TAIL].export_rows(0, 1, kv=True, state=False)
        return tokens_per_push(sum(section.n_bytes for section in one))

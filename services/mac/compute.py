"""The compute thread: takes requests from the queue into lanes and moves them on, one small step at a time.

It owns the engine and the residual channel; nobody else touches them. One request computes at a time: the main lane
serves any request; the short lane serves a short one while a long one is in the main lane. It emits events and never
waits for whoever listens. An error fails the request it happened in and never the process. Policy lives elsewhere:
what next and whose turn in `schedule`, who computes in `reading`, what a prefix is worth in `grid` and `landmarks`.
With nothing else to do, it makes the rows of answers canonical, an ubatch at a time. Started by services.mac.host.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from common.crash_note import Slot
from common.errors import LinkError, OutOfMemoryError, OutriggerError, RequestError
from common.limits import UBATCH_TOKENS
from common.log import bound, get_log
from common.wire import messages as m
from services.mac.holding import Holding, PagesLostError
from services.mac.lane import Emit, Lane
from services.mac.reading import Reading, Reads
from services.mac.requests import Request, RequestQueue
from services.mac.schedule import SHORT_TOKENS_MAX, Balance, Step, short_lane_is_home
from services.mac.sequence import SNAPSHOT_BYTES_MAX, HeldSequence
from services.mac.tally import Tally
from services.mac.worker import Worker

IDLE_S = 0.25
"""Longest sleep between two beats."""
WORKER_WAIT_S = 0.1
"""Longest wait for the worker within one step."""

log = get_log()


class Compute:
    """The loop of the compute thread. Everything given here is used by that thread only, except queue and worker."""

    def __init__(
        self,
        engine: Any,
        queue: RequestQueue,
        worker: Worker,
        emit: Emit,
        reads: Reads,
        *,
        short_sequence: Any | None = None,
        canonical: bool = True,
        snapshot_bytes: int = SNAPSHOT_BYTES_MAX,
        tally: Tally | None = None,
        holding: Holding | None = None,
        crash_slot: Slot | None = None,
    ) -> None:
        """reads: begins the reads. emit may be called from this thread.

        short_sequence: a further sequence of the engine for the short lane; without one there is no short lane.
        holding: where old pages of the engine's own sequence go.
        canonical: run answers again in idle time. snapshot_bytes: cap of the kept recurrent states, of all lanes.
        """
        self.engine, self.queue, self.worker = engine, queue, worker
        self.beat = 0
        self._emit, self._reads = emit, reads
        self._tally = tally or Tally()
        self._crash_slot = crash_slot or Slot()
        self._balance = Balance()
        self._canonical = canonical
        self._snapshot_bytes = snapshot_bytes // 2 if short_sequence else snapshot_bytes
        self._holding = holding
        self._main = self._new_lane(engine, self._begin_read)
        self._main.sequence.holding = holding
        self._short = self._new_lane(short_sequence, self._begin_short_read) if short_sequence else None
        self._lanes = [lane for lane in (self._main, self._short) if lane]

    def run(self) -> None:
        """Serve until the queue is closed, and end what runs then."""
        while not self.queue.closed or any(lane.turn for lane in self._lanes):
            self.beat += 1
            seen = self.queue.changes
            self._admit()
            lane = self._next_lane()
            if lane is not None:
                self._advance(lane)
            elif not self._use_idle_time():
                self._crash_slot.clear()
                self.queue.wait(IDLE_S, seen)

    def start(self) -> threading.Thread:
        """Run in a thread of its own."""
        thread = threading.Thread(target=self.run, name="compute", daemon=True)
        thread.start()
        return thread

    @property
    def n_ctx(self) -> int:
        """Tokens of context that clients have now. Any thread may ask."""
        return self._holding.n_ctx if self._holding else self.engine.n_ctx

    # --- who is in which lane

    def _new_lane(self, sequence: Any, begin_read: Callable[[HeldSequence, Request], Reading]) -> Lane:
        held = HeldSequence(sequence, self.worker.split_layer, snapshot_bytes=self._snapshot_bytes)
        return Lane(
            held,
            begin_read,
            self._emit,
            self._tally,
            n_ctx=lambda: self.n_ctx,
            clock=self.queue.clock,
            canonical=self._canonical,
        )

    def _admit(self) -> None:
        """Fill free lanes: whoever outgrew the short lane first, then who waits longest and may go there.

        A short request goes where its conversation is, or where it pushes out less of another one.
        """
        main, short = self._main, self._short
        if main.turn is None and short and short.step is Step.MOVE:
            self._guarded(short, lambda: main.take_over(short))
        if main.turn is None and (request := self.queue.take()):
            self._enter(self._home(request), request)
        if main.turn and short and short.turn is None and (request := self.queue.take(self._is_short)):
            self._enter(short, request)

    def _is_short(self, request: Request) -> bool:
        assert self._short is not None
        n_prompt, sequence = len(request.tokens), self._short.sequence
        return n_prompt < sequence.n_ctx and n_prompt - sequence.reusable(request.tokens) <= SHORT_TOKENS_MAX

    def _home(self, request: Request) -> Lane:
        """The lane for `request` when the main lane is free."""
        main, short = self._main, self._short
        if short is None or short.turn is not None:
            return main
        offers = [lane.sequence.offer(request.tokens) for lane in (main, short)]
        if self._is_short(request):
            return short if short_lane_is_home(*offers) else main
        if offers[1].reused > offers[0].reused:
            try:
                main.sequence.adopt(short.sequence)
            except (OutriggerError, MemoryError):
                log.exception("a conversation could not move to the main lane; it will be read again")
        return main

    def _enter(self, lane: Lane, request: Request) -> None:
        with bound(request_id=request.ask.request_id):
            try:
                lane.enter(request)
                self._reads.check(request.ask)
            except OutriggerError as error:
                self._fail(request, error)
                self.queue.done(lane.leave())

    # --- whose turn it is

    def _next_lane(self) -> Lane | None:
        """The lane that computes next; None when all wait."""
        main, short = self._main, self._short
        for lane in self._lanes:
            if (step := lane.step) and step.ends:
                return lane
        if short is None or not short.can_advance:
            return main if main.can_advance else None
        if not main.can_advance:
            return short
        if main.waits_for_worker:
            self._advance(main, wait_s=0.0)  # take what has come; its waiting time is the short lane's
            return short if main.waits_for_worker else self._next_lane()
        return short if self._balance.short_first else main

    def _advance(self, lane: Lane, wait_s: float = WORKER_WAIT_S) -> None:
        """One step of a lane, charged to it."""
        contended = all(each.can_advance and not each.waits_for_worker for each in self._lanes)
        self._crash_slot.write(lane.doing)
        started_s = self.queue.clock()
        self._guarded(lane, lambda: self._step(lane, wait_s))
        seconds = self.queue.clock() - started_s
        self._balance = self._balance.ran(short=lane is self._short, seconds=seconds, contended=contended)

    def _step(self, lane: Lane, wait_s: float) -> bool:
        """One step of a lane; before it, memory for what it computes, and after it, what becomes of old pages."""
        holding, step = self._holding, lane.step
        if holding is None or lane is not self._main or step not in (Step.READ, Step.DECODE):
            return lane.advance(wait_s)
        goes_on = True
        try:
            if not holding.has_room(2 * UBATCH_TOKENS if step is Step.READ else 1):
                holding.wait(WORKER_WAIT_S, lane.sequence.n_canonical)
                return True
            goes_on = lane.advance(wait_s)
            holding.step(lane.sequence.n_canonical)
        except PagesLostError as error:
            if goes_on:
                lane.redo(error)
            else:
                lane.sequence.forget()
        return goes_on

    def _guarded(self, lane: Lane, act: Callable[[], bool | None]) -> None:
        """Do something in a lane. Whatever goes wrong there ends the lane's request and nothing else."""
        assert lane.turn is not None
        request = lane.turn.request
        over = True
        with bound(request_id=request.ask.request_id):
            try:
                over = act() is False
            except OutriggerError as error:
                if not isinstance(error, RequestError | LinkError):
                    self._forget(lane)
                self._fail(request, error)
            except MemoryError:
                self._forget(lane)
                for each in self._lanes:
                    each.sequence.snapshots.shed()
                self._fail(
                    request, OutOfMemoryError("the host's memory is short; try a shorter prompt, or later")
                )
            except Exception as error:
                self._forget(lane)
                log.exception("request failed unexpectedly")
                detail = f"internal error: {type(error).__name__}: {error}"
                self._emit(request, m.Failed(request.ask.request_id, OutriggerError.code, detail))
        if over:
            for each in self._lanes:
                if each.turn and each.turn.request is request:
                    self.queue.done(each.leave())

    # --- reads

    def _begin_read(self, sequence: HeldSequence, request: Request) -> Reading:
        """A read in the main lane: with the worker when it stands ready and there is enough to read."""
        if self._holding:
            sequence.resume(request.tokens)
        start = self._begin(sequence, request)
        if self._holding and request.ask.n_choices > 1:
            self._holding.keeps_only(len(request.tokens))
        return self._reads.read(sequence, request.tokens, start)

    def _begin_short_read(self, sequence: HeldSequence, request: Request) -> Reading:
        """A read in the short lane: on the host alone; the worker's mirror belongs to the main lane's sequence."""
        return self._reads.read_alone(sequence, request.tokens, self._begin(sequence, request))

    def _begin(self, sequence: HeldSequence, request: Request) -> int:
        """Where the read starts; if rows at hand are lost by that, say why."""
        start = sequence.begin(request.tokens, request.ask.stop_token_ids)
        if (diverged := sequence.diverged) is not None:
            self._tally.diverged(diverged.cause)
            where = {"position": diverged.position, "cause": diverged.cause}
            log.info("prompt parts from the rows at hand", tokens_lost=diverged.lost, **where)
            log.debug("where it parts", held_ids=diverged.held_ids, asked_ids=diverged.asked_ids, **where)
        return start

    # --- idle time

    @property
    def n_provisional(self) -> int:
        """Tokens of answers that wait for idle time. Any thread may ask."""
        return sum(lane.sequence.n_provisional for lane in self._lanes)

    def _use_idle_time(self) -> bool:
        """Run one ubatch of an answer again, or ready the worker; False when neither is due, or somebody is served."""
        if self.queue.closed or any(lane.turn for lane in self._lanes):
            return False
        if self._holding and self._mind_pages(self._holding):
            return True
        lane = next((lane for lane in self._lanes if lane.sequence.n_provisional), None)
        if lane is None:
            others = [self._short.sequence] if self._short else []
            return self._reads.use_idle_time(self._main.sequence, others)
        n_before = lane.sequence.n_provisional
        self._crash_slot.write(f"making an answer canonical, {n_before} tokens to go")
        try:
            if self._holding and lane is self._main and not self._holding.has_room(UBATCH_TOKENS):
                self._holding.wait(WORKER_WAIT_S, lane.sequence.n_canonical)
                return True
            lane.sequence.advance_canonical()
        except Exception:
            log.exception("an answer could not be made canonical; its conversation will be read again")
            self._forget(lane)
        self._tally.made_canonical(max(0, n_before - lane.sequence.n_provisional))
        return True

    def _mind_pages(self, holding: Holding) -> bool:
        """See to old pages of a sequence that nobody uses now; False when there is nothing to wait for."""
        try:
            holding.step(self._main.sequence.n_canonical)
            if holding.is_busy:
                holding.wait(WORKER_WAIT_S, self._main.sequence.n_canonical)
        except PagesLostError as error:
            log.warning("pages of the sequence are lost, its next turn reads them again", error=str(error))
            self._forget(self._main)
        return holding.is_busy

    # --- failures

    def _forget(self, lane: Lane) -> None:
        """Empty a sequence after an error inside the engine; if even that fails, the next request will say so."""
        try:
            lane.sequence.forget()
        except Exception:
            log.exception("the sequence could not be emptied")

    def _fail(self, request: Request, error: OutriggerError) -> None:
        log.warning("request failed", code=error.code, error=str(error))
        self._emit(request, m.Failed(request.ask.request_id, error.code, str(error)))

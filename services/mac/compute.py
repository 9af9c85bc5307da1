"""The compute thread: takes requests from the queue and performs what `next_step` decides, one small step at a time.

It owns the engine and the residual channel; nobody else touches them. It emits events and never waits for whoever
listens. An error fails the request it happened in and never the process. Policy lives elsewhere: what next in
`schedule`, who computes in `plan`, what a prefix is worth in `grid`. Started by services.mac.host.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

from common.errors import ContextExceededError, LinkDeadlineError, LinkError, OutriggerError, RequestError
from common.log import bound, get_log
from common.wire import messages as m
from services.mac.plan import plan_read
from services.mac.read import Read
from services.mac.remote_span import RemoteSpan, ResidualChannel
from services.mac.requests import Request, RequestQueue
from services.mac.rows_check import TailRows
from services.mac.schedule import Step, next_step
from services.mac.sequence import HeldSequence
from services.mac.tally import Tally
from services.mac.turn import Turn
from services.mac.worker import Worker

IDLE_S = 0.25
"""Longest sleep between two beats."""

log = get_log()
Emit = Callable[[Request, m.Message], None]


class Compute:
    """The loop of the compute thread. Everything given here is used by that thread only, except queue and worker."""

    def __init__(
        self,
        engine: Any,
        queue: RequestQueue,
        worker: Worker,
        emit: Emit,
        *,
        channel: ResidualChannel | None,
        split_tokens_min: int,
        on_link_failure: Callable[[LinkError], None] = lambda _error: None,
        tally: Tally | None = None,
    ) -> None:
        """channel: the residual route, needed when worker.split_layer is set. emit may be called from this thread."""
        self.engine, self.queue, self.worker = engine, queue, worker
        self.beat = 0
        self._emit, self._channel = emit, channel
        self._split_tokens_min = split_tokens_min
        self._on_link_failure = on_link_failure
        self._tally = tally or Tally()
        self._tickets = itertools.count(1)
        self._remote: RemoteSpan | None = None
        self._sequence = HeldSequence(engine, worker.split_layer)

    def run(self) -> None:
        """Serve until the queue is closed."""
        while not self.queue.closed:
            self.beat += 1
            request = self.queue.take(IDLE_S)
            if request is not None:
                try:
                    with bound(request_id=request.ask.request_id):
                        self._serve(request)
                finally:
                    self.queue.done()

    def start(self) -> threading.Thread:
        """Run in a thread of its own."""
        thread = threading.Thread(target=self.run, name="compute", daemon=True)
        thread.start()
        return thread

    # --- one request

    def _serve(self, request: Request) -> None:
        """Serve a request to its end, whatever end that is."""
        turn = Turn(request, self.queue.clock())
        try:
            self._check(request)
            while not self._step(turn):
                self.beat += 1
        except OutriggerError as error:
            if not isinstance(error, RequestError | LinkError):
                self._forget()
            log.warning("request failed", code=error.code, error=str(error))
            self._fail(request, error.code, str(error))
        except Exception as error:
            self._forget()
            log.exception("request failed unexpectedly")
            self._fail(request, OutriggerError.code, f"internal error: {type(error).__name__}: {error}")
        finally:
            turn.close()

    def _check(self, request: Request) -> None:
        n_prompt = len(request.tokens)
        if n_prompt > self.engine.n_ctx:
            raise ContextExceededError(n_prompt, self.engine.n_ctx)
        if n_prompt == 0:
            raise RequestError("the prompt is empty; give at least one token", param="prompt")
        n_vocab = self.engine.spec.n_vocab
        if request.tokens.min() < 0 or request.tokens.max() >= n_vocab:
            raise RequestError(f"the prompt holds token ids outside 0 to {n_vocab - 1}", param="prompt")

    def _step(self, turn: Turn) -> bool:
        """Do the next thing; True when the request is over."""
        request = turn.request
        match next_step(turn.view(self.engine.n_ctx, self.queue.clock())):
            case Step.READ:
                self._read(turn)
            case Step.DECODE:
                self._decode(turn)
            case Step.WAIT:
                self.queue.wait(IDLE_S)
            case Step.STOP:
                return self._finish(turn, "stop")
            case Step.LENGTH:
                return self._finish(turn, "length")
            case Step.CANCELLED:
                return self._finish(turn, "cancelled")
            case Step.EXPIRED:
                late = f"the request's deadline of {request.ask.deadline_s:g} s passed"
                self._fail(request, LinkDeadlineError.code, late)
                return True
        return False

    def _read(self, turn: Turn) -> None:
        """One piece of the prompt's read; the first piece plans it."""
        if turn.read is None:
            turn.read = self._begin_read(turn.request)
        read = turn.read
        done_before = read.tokens_done
        read.advance()
        if read.tokens_done != done_before:
            request = turn.request
            advanced = m.PrefillAdvanced(request.ask.request_id, read.tokens_done, len(request.tokens))
            self._emit(request, advanced)
        if read.logits is not None:
            self._tally.read_done(turn.read_done())

    def _begin_read(self, request: Request) -> Read:
        standing = self.worker.standing
        remote = self._remote_span() if standing == "ready" else None
        start = self._sequence.begin(request.tokens)
        plan = plan_read(start, len(request.tokens), worker=standing, split_tokens_min=self._split_tokens_min)
        return Read(
            self._sequence, request.tokens, plan, remote, on_fallback=self._fell_back, clock=self.queue.clock
        )

    def _remote_span(self) -> RemoteSpan:
        """The span of the link as it is now; a new life of the link is a new span with an unknown mirror."""
        link, split_layer = self.worker.link, self.worker.split_layer
        if self._remote is None or self._remote.link_epoch != link.epoch:
            assert self._channel is not None, "a split layer needs a residual channel"
            rows = TailRows(self.engine.spec, split_layer, self.engine.spec.n_layer_full)
            self._remote = RemoteSpan(
                self._channel, rows, link_epoch=link.epoch, window=link.window, tickets=self._tickets
            )
            self._sequence.mirror = self._remote.mirror
        return self._remote

    def _fell_back(self, error: LinkError) -> None:
        """A worker failed in the middle of a read, which is about to be redone here."""
        log.warning("worker failed, read is redone on the host", cause=error.cause, error=str(error))
        self.worker.failed()
        self._remote = None
        self._sequence.mirror = None
        self._tally.fell_back(error.cause)
        self._on_link_failure(error)

    def _decode(self, turn: Turn) -> None:
        """Choose the next token and send it, or note that it is a stop token; the first one needs no computing."""
        request, started_s = turn.request, self.queue.clock()
        if request.generated:
            position = len(request.tokens) + len(request.generated) - 1
            turn.logits = self._sequence.decode(request.generated[-1], position)
        token_id = turn.choose(self.engine.spec.n_vocab)
        now_s = self.queue.clock()
        turn.decode_s += now_s - started_s
        if token_id in request.ask.stop_token_ids:
            request.stopped = True
            return
        request.generated.append(token_id)
        self._tally.token_sent(now_s - started_s)
        ready = m.TokenReady(request.ask.request_id, len(request.generated) - 1, token_id)
        self._emit(request, ready)

    def _finish(self, turn: Turn, reason: Any) -> bool:
        request = turn.request
        finished = m.Finished(
            request.ask.request_id,
            reason,
            n_prompt=len(request.tokens),
            n_generated=len(request.generated),
            report=turn.final_report(),
        )
        self._emit(request, finished)
        return True

    def _forget(self) -> None:
        """Empty the sequence after an error inside the engine; if even that fails, the next request will say so."""
        try:
            self._sequence.forget()
        except Exception:
            log.exception("the sequence could not be emptied")

    def _fail(self, request: Request, code: int, detail: str) -> None:
        self._emit(request, m.Failed(request.ask.request_id, code, detail))

"""A lane: one sequence of the engine and the request that is in it, moved on by one small step at a time.

Performs what `next_step` decides and tells each event. It does not know the other lane, nor the worker (whoever begins
a read for it does). Errors go through to services.mac.compute, which owns the lanes.
"""

from __future__ import annotations

from collections.abc import Callable

from common.errors import ContextExceededError, LinkDeadlineError, RequestError
from common.log import get_log
from common.wire import messages as m
from services.mac.choice import Choice, EndReason
from services.mac.holding import PagesLostError
from services.mac.reading import Reading
from services.mac.requests import Request
from services.mac.schedule import Step, next_step
from services.mac.sequence import HeldSequence
from services.mac.tally import Tally
from services.mac.turn import Turn

log = get_log()
Emit = Callable[[Request, m.Message], None]
ENDINGS: dict[Step, EndReason] = {Step.STOP: "stop", Step.LENGTH: "length", Step.CANCELLED: "cancelled"}
REDO_MAX = 3
"""How often a request is begun again because pages were lost."""
IDLE_STEPS = (Step.WAIT, Step.MOVE)


class Lane:
    """Used on the compute thread only."""

    def __init__(
        self,
        sequence: HeldSequence,
        begin_read: Callable[[HeldSequence, Request], Reading],
        emit: Emit,
        tally: Tally,
        *,
        n_ctx: Callable[[], int],
        clock: Callable[[], float],
        canonical: bool = True,
    ) -> None:
        """n_ctx: the model's context now, which the sequence may hold only a part of.

        canonical: the rows of answers are to be made canonical in idle time, so that the next turn can reuse them.
        """
        self.sequence = sequence
        self.turn: Turn | None = None
        self._begin_read, self._emit, self._tally = begin_read, emit, tally
        self._n_ctx, self._clock, self._canonical = n_ctx, clock, canonical

    # --- what it could do

    @property
    def step(self) -> Step | None:
        """What it would do next; None when no request is in it."""
        if self.turn is None:
            return None
        return next_step(self.turn.view(self._n_ctx(), self.sequence.n_ctx, self._clock()))

    @property
    def can_advance(self) -> bool:
        """There is something to do other than waiting for the client or the other lane."""
        return self.step not in (None, *IDLE_STEPS)

    @property
    def waits_for_worker(self) -> bool:
        """Its read has nothing to compute before the worker's next answer."""
        return self.turn is not None and self.turn.read is not None and self.turn.read.waits

    @property
    def doing(self) -> str:
        """What its next step computes: told, should the process die of it."""
        turn = self.turn
        assert turn is not None
        request, read = turn.request, turn.read
        n_prompt, name = len(request.tokens), request.ask.request_id
        if read is None or not turn.is_read:
            return f"reading {name}, {read.tokens_done if read else 0} of {n_prompt} tokens done"
        return f"writing {name}, token {request.n_sent} after a prompt of {n_prompt}"

    # --- a request comes and goes

    def enter(self, request: Request) -> None:
        """Take a request in. Raises RequestError, ContextExceededError or EngineError when it cannot be served."""
        self.turn = Turn(request, self._clock())
        n_prompt = len(request.tokens)
        if n_prompt > (n_ctx := self._n_ctx()):
            raise ContextExceededError(n_prompt, n_ctx)
        if n_prompt == 0:
            raise RequestError("the prompt is empty; give at least one token", param="prompt")
        n_vocab = self.sequence.spec.n_vocab
        if request.tokens.min() < 0 or request.tokens.max() >= n_vocab:
            raise RequestError(f"the prompt holds token ids outside 0 to {n_vocab - 1}", param="prompt")
        self.turn.open(n_vocab)

    def leave(self) -> Request:
        """The request is over, or moves to another lane's sequence (see `take_over`)."""
        turn, self.turn = self.turn, None
        assert turn is not None
        turn.close()
        return turn.request

    def take_over(self, other: Lane) -> None:
        """Go on with the other lane's request, whose rows are copied into this lane's sequence."""
        assert self.turn is None and other.turn is not None
        self.sequence.adopt(other.sequence)
        self.turn, other.turn = other.turn, None

    def redo(self, error: PagesLostError) -> None:
        """Pages of the sequence are lost: read the prompt again, and run the answer's tokens as they were run before,
        each as a row of its own, so that what follows has the bits it would have had.

        Raises the error where that cannot be done: several answers take turns in the sequence, or it does not help.
        """
        turn = self.turn
        assert turn is not None
        if turn.n_redone >= REDO_MAX or len(turn.choices) > 1:
            raise error
        log.warning("pages of the sequence are lost, it is read again", error=str(error))
        turn.again()
        self.sequence.forget()

    # --- one step

    def advance(self, wait_s: float) -> bool:
        """Do the next thing; False when the request is over. wait_s: longest wait for the worker, if that is next."""
        turn, step = self.turn, self.step
        assert turn is not None and step is not None
        if step is Step.READ:
            self._read(turn, wait_s)
        elif step is Step.DECODE:
            self._decode(turn)
        elif step is Step.EXPIRED:
            ask = turn.request.ask
            late = f"the request's deadline of {ask.deadline_s:g} s passed"
            self._emit(turn.request, m.Failed(ask.request_id, LinkDeadlineError.code, late))
            return False
        elif step in ENDINGS:
            return self._end_choice(turn, ENDINGS[step])
        return True

    def _read(self, turn: Turn, wait_s: float) -> None:
        """One piece of the prompt's read; the first piece plans it."""
        request = turn.request
        if turn.read is None:
            turn.read = self._begin_read(self.sequence, request)
        read = turn.read
        if turn.is_read:
            self._wait_for_token(turn, read, wait_s)
            return
        done_before = read.tokens_done
        read.advance(wait_s)
        if read.tokens_done != done_before and not turn.n_redone:
            advanced = m.PrefillAdvanced(request.ask.request_id, read.tokens_done, len(request.tokens))
            self._emit(request, advanced)
        if read.logits is not None:
            self._tally.read_done(turn.read_done(self.sequence.whole))

    def _wait_for_token(self, turn: Turn, read: Reading, wait_s: float) -> None:
        """One step towards the logits of the newest token, whose last layers are elsewhere."""
        started_s = self._clock()
        read.advance(wait_s)
        turn.decode_s += self._clock() - started_s
        if read.logits is not None:
            turn.token_done()

    def _decode(self, turn: Turn) -> None:
        """Choose the next token and send it, or note that it is a stop token; the first one needs no computing.

        If its logits do not come at once, nothing is chosen yet: `_wait_for_token` is next.
        """
        choice, started_s = turn.choice, self._clock()
        if turn.n_behind:
            position = len(turn.request.tokens) + len(choice.generated) - 1 - turn.n_behind
            assert turn.read is not None
            turn.read.follow(self.sequence, choice.generated[-1 - turn.n_behind], position)
            turn.n_behind -= 1
            return
        if choice.generated:
            position = len(turn.request.tokens) + len(choice.generated) - 1
            assert turn.read is not None
            choice.logits = turn.read.follow(self.sequence, choice.generated[-1], position)
            if choice.logits is None:
                return
        ready = choice.choose()
        seconds = self._clock() - started_s
        turn.decode_s += seconds
        if ready is None:
            return
        turn.request.n_sent += 1
        self._tally.token_sent(seconds)
        self._emit(turn.request, ready)
        turn.rotate(self.sequence.whole, wrote=True)

    def _end_choice(self, turn: Turn, reason: EndReason) -> bool:
        """End the choice whose turn it is (all of them, when the client left); False when none goes on."""
        last = turn.choice
        if reason == "cancelled" and turn.request.cancelled:
            for choice in turn.choices:
                choice.ended = choice.ended or reason
        last.ended = reason
        if turn.rotate(self.sequence.whole):
            self._emit(turn.request, self._choice_finished(turn, last))
            return True
        if self._canonical and turn.is_read:
            self.sequence.answered(turn.choices[0].generated)
        finished = m.Finished(
            turn.request.ask.request_id,
            reason,
            n_prompt=len(turn.request.tokens),
            n_generated=len(last.generated),
            report=turn.final_report(),
            choice=last.index,
        )
        self._emit(turn.request, finished)
        return False

    @staticmethod
    def _choice_finished(turn: Turn, choice: Choice) -> m.ChoiceFinished:
        assert choice.ended is not None
        n_generated = len(choice.generated)
        return m.ChoiceFinished(turn.request.ask.request_id, choice.index, choice.ended, n_generated)

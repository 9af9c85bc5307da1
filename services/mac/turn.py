"""The compute thread's own notes on a request it serves: its read, its choices, its times.

Lives from the moment the request is taken to its end. Used by services.mac.lane only.
"""

from __future__ import annotations

from typing import Any

import msgspec

from common.state.recurrent import RecurrentSnapshot
from common.wire.messages import ReadReport
from services.mac.choice import Choice
from services.mac.reading import Reading
from services.mac.requests import Request
from services.mac.schedule import RequestView, next_choice


class Turn:
    """One request's turn on the engine."""

    def __init__(self, request: Request, now_s: float) -> None:
        self.request = request
        self.queue_s = now_s - request.arrived_s
        self.read: Reading | None = None
        self.is_read = False
        """The prompt is through all layers."""
        self.choices: list[Choice] = []
        self.decode_s = 0.0
        self.n_redone = 0
        """How often it was begun again because pages were lost."""
        self.n_behind = 0
        """Tokens of the answer, before its newest, that are to be run again."""
        self._current = 0
        self._n_in_slice = 0
        self._prompt: RecurrentSnapshot | None = None
        """Where several choices part: the state at the end of the prompt."""

    def open(self, n_vocab: int) -> None:
        """Make the choices. Raises EngineError for sampling values that make no sense."""
        for index in range(self.request.ask.n_choices):
            self.choices.append(Choice(index, self.request.ask, n_vocab))

    @property
    def choice(self) -> Choice:
        """The choice whose turn it is."""
        return self.choices[self._current]

    def view(self, n_ctx: int, n_room: int, now_s: float) -> RequestView:
        """What `next_step` needs to know."""
        request, choice = self.request, self.choice
        return RequestView(
            n_prompt=len(request.tokens),
            n_ctx=n_ctx,
            n_room=n_room,
            max_tokens=request.ask.max_tokens,
            has_logits=choice.logits is not None,
            n_generated=len(choice.generated),
            credit=request.credit,
            stopped=choice.stopped,
            cancelled=request.cancelled or choice.index in request.choices_cancelled,
            expired=now_s >= request.deadline_s,
        )

    def read_done(self, whole: Any) -> ReadReport:
        """Take over what the finished read leaves: the logits of the prompt's last token, and its report."""
        assert self.read is not None and self.read.logits is not None
        for choice in self.choices:
            choice.logits = self.read.logits
        if len(self.choices) > 1:
            self._prompt = whole.snapshot()
        self.is_read = True
        return self.read.report()

    def again(self) -> None:
        """Begin again: the prompt is to be read anew, and then what was written so far is run again."""
        if self.read is not None and self.read.logits is None:
            self.read.abandon()
        self.read, self.is_read = None, False
        self.choice.logits = None
        self.n_behind = max(0, len(self.choice.generated) - 1)
        self.n_redone += 1

    def token_done(self) -> None:
        """Take over the logits of the newest token of the answer, which came with a step of the read."""
        assert self.read is not None
        self.choice.logits = self.read.logits

    def rotate(self, whole: Any, *, wrote: bool = False) -> bool:
        """Go on to the choice whose turn is next; False when all have ended. wrote: a token was just sent."""
        open_choices = [choice.index for choice in self.choices if choice.ended is None]
        if not open_choices:
            return False
        self._n_in_slice += wrote
        chosen = next_choice(open_choices, self._current, self._n_in_slice)
        if chosen != self._current:
            self._switch(whole, chosen)
        return True

    def _switch(self, whole: Any, chosen: int) -> None:
        if self._prompt is not None:
            if self.choice.ended is None:
                self.choice.park(whole, self._prompt.n_valid)
            self.choices[chosen].unpark(whole, self._prompt)
        self._current, self._n_in_slice = chosen, 0

    def final_report(self) -> ReadReport:
        """The read's report with the times of the whole turn."""
        report = self.read.report() if self.read and self.is_read else ReadReport()
        return msgspec.structs.replace(report, queue_s=self.queue_s, decode_s=self.decode_s)

    def close(self) -> None:
        """Give up what is unfinished and free the samplers."""
        if self.read is not None and self.read.logits is None:
            self.read.abandon()
        for choice in self.choices:
            choice.close()

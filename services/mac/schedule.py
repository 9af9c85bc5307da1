"""What the compute thread does next: pure decisions, read from top to bottom.

`next_step` decides for one request, before every step, so that a cancel or a deadline is seen within one ubatch.
`Balance` decides whose turn it is when two requests want to compute: a long one in the main lane and a short one in
the short lane each get their share of the computing time. `next_choice` rotates among the choices of one request.
Knows nothing of engines, sockets or clocks. Called by services.mac.compute and services.mac.lane.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

SHORT_TOKENS_MAX = 512
"""New tokens of a prompt that counts as short, and may overtake a long one."""
SHORT_SHARE = 0.5
"""Share of the computing time that short requests get while a long one computes too; the long one gets the rest."""
CHOICE_SLICE_TOKENS = 16
"""Tokens one choice writes before the next one's turn: rarely enough that moving rows in and out costs nothing."""


class Step(Enum):
    """The possible next steps."""

    READ = "read the prompt's next ubatch"
    DECODE = "compute and send one more token"
    WAIT = "wait for credit"
    MOVE = "wait for the lane with more room"
    STOP = "finish: a stop token came"
    LENGTH = "finish: enough tokens, or the context is full"
    CANCELLED = "finish: the client does not want it any more"
    EXPIRED = "fail: the deadline passed"

    @property
    def ends(self) -> bool:
        """It ends the request or a choice of it, which costs no computing: done at once, whosever turn it is."""
        return self in (Step.STOP, Step.LENGTH, Step.CANCELLED, Step.EXPIRED)


@dataclass(frozen=True)
class RequestView:
    """All that the decision depends on; of a request with several choices, the one whose turn it is."""

    n_prompt: int
    n_ctx: int
    """Positions of the model's context."""
    n_room: int
    """Positions of the sequence the request is in; at most n_ctx."""
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
    # The first token needs no cell: its logits are the prompt's. Each further one needs a cell for the one before it.
    n_cells = view.n_prompt + view.n_generated if view.n_generated else 0
    if n_cells > view.n_ctx:
        return Step.LENGTH
    if view.credit <= 0:
        return Step.WAIT
    return Step.MOVE if n_cells > view.n_room else Step.DECODE


def next_choice(open_choices: Sequence[int], current: int, n_in_slice: int) -> int:
    """The choice to go on with: the same one within its slice, then the next that is open, in a circle."""
    if current in open_choices and n_in_slice < CHOICE_SLICE_TOKENS:
        return current
    return next((choice for choice in open_choices if choice > current), open_choices[0])


@dataclass(frozen=True)
class Offer:
    """What a free lane has for a request: rows it would reuse, and rows of another conversation it would lose."""

    reused: int
    lost: int


def short_lane_is_home(main: Offer, short: Offer) -> bool:
    """Which of two free lanes a short request goes to: where more is reused, else where less is lost."""
    if main.reused != short.reused:
        return short.reused > main.reused
    return short.lost < main.lost


@dataclass(frozen=True)
class Balance:
    """The account between the two lanes. `debt_s`: seconds the short lane has had beyond its share.

    Only time in which both wanted to compute is charged, so that neither saves up credit while the other is idle.
    Whatever arrives, the long request gets at least 1 - SHORT_SHARE of the time both want, less one step; and a short
    one that meets no debt starts at the next step's border.
    """

    debt_s: float = 0.0

    @property
    def short_first(self) -> bool:
        """Whose step is next when both lanes can compute."""
        return self.debt_s <= 0

    def ran(self, *, short: bool, seconds: float, contended: bool) -> Balance:
        """The account after a step of one lane. A lane that runs alone only pays off what stands against the other."""
        change_s = seconds * (1 - SHORT_SHARE) if short else -seconds * SHORT_SHARE
        debt_s = self.debt_s + change_s
        if contended:
            return Balance(debt_s)
        if short:
            return Balance(min(0.0, debt_s) if self.debt_s < 0 else self.debt_s)
        return Balance(max(0.0, debt_s) if self.debt_s > 0 else self.debt_s)

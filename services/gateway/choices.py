"""One choice of an answer: its tokens in; text, log-probabilities and the reason of its end out.

Pure. Text that may still become a stop string is held back, and with it what is told of the tokens it came from, so
that a stop string never leaves by either door. Called by streams.py, once for each choice of a request.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from common.wire import messages as m
from services.gateway.text import TextStream

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Spelled:
    """A token as bytes, and the logarithm of its probability."""

    data: bytes
    logprob: float

    @property
    def text(self) -> str:
        """The bytes as text; what is no whole character is U+FFFD."""
        return self.data.decode("utf-8", "replace")


@dataclass(frozen=True, slots=True)
class TokenTold:
    """What a client asked to be told of one token."""

    chosen: Spelled
    top: tuple[Spelled, ...]
    """The likeliest tokens, likeliest first."""
    text_offset: int
    """Characters of the choice's text before the token."""


@dataclass(frozen=True, slots=True)
class Released:
    """What may leave now: text, and the tokens all of whose characters have left."""

    text: str
    token_ids: tuple[int, ...] = ()
    told: tuple[TokenTold, ...] = ()
    """One for each token, when somebody asked for log-probabilities."""


class Choice:
    """A choice between host and client."""

    def __init__(
        self,
        index: int,
        stops: Sequence[str],
        piece_of: Callable[[int], bytes],
        spell: Callable[[int], bytes],
    ) -> None:
        """piece_of: bytes a token adds to the text; spell: how it is written, control tokens included."""
        self.index = index
        self.n_received = 0
        self.n_counted = 0
        """Tokens of the answer: those received until a stop string was complete."""
        self.ended = False
        self._text = TextStream(stops)
        self._piece_of, self._spell = piece_of, spell
        self._held: deque[tuple[int, int, TokenTold | None]] = deque()

    @property
    def stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._text.stopped

    def push(self, token_id: int, logprobs: m.TokenLogprobs | None) -> Released:
        """What may leave now that a token came."""
        self.n_received += 1
        if self.stopped:  # sent before the host heard that the choice has ended
            return Released("")
        self.n_counted += 1
        offset = self._text.n_decoded
        text = self._text.push(self._piece_of(token_id))
        told = None if logprobs is None else self._told(token_id, logprobs, offset)
        self._held.append((self._text.n_begun, token_id, told))
        return self._released(text)

    def end(self) -> Released:
        """What was still held back and did not become a stop string."""
        self.ended = True
        return self._released(self._text.end())

    def reason(self, told: str) -> FinishReason:
        """The reason for the client, when the host ended the choice for reason `told`."""
        return "length" if told == "length" and not self.stopped else "stop"

    def _released(self, text: str) -> Released:
        token_ids, tellings = [], []
        while self._held and self._held[0][0] <= self._text.n_sent:
            _, token_id, told = self._held.popleft()
            token_ids.append(token_id)
            if told is not None:
                tellings.append(told)
        return Released(text, tuple(token_ids), tuple(tellings))

    def _told(self, token_id: int, logprobs: m.TokenLogprobs, offset: int) -> TokenTold:
        top = tuple(Spelled(self._spell(other), logprob) for other, logprob in logprobs.top)
        return TokenTold(Spelled(self._spell(token_id), logprobs.logprob), top, offset)

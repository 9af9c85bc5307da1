"""What one request still has to tell its ZeroMQ client: messages wait here for the client's credit, in order.

Pure: no socket, and the clock is handed in. The host is never kept waiting by a client: pieces are taken from it at
once and wait here, up to PUBLIC_BUFFER_TOKENS_MAX; what happens then is public_door.py's rule. Several tokens that
wait become one message.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from common.limits import PUBLIC_BUFFER_TOKENS_MAX, PUBLIC_PIECE_TOKENS_MAX
from common.wire import public as p
from services.gateway.answers import chat_logprobs
from services.gateway.streams import ChoiceEnded, Ended, Piece, Reading, Waiting, Wrote

Report = Callable[[Ended], dict[str, Any] | None]


class Outflow:
    """The messages of one request. `peek` at the next, send it, say `sent`."""

    def __init__(
        self, ask_id: str, credit: int, now: float, tokens_waiting_max: int = PUBLIC_BUFFER_TOKENS_MAX
    ) -> None:
        self.id = ask_id
        self.credit = credit
        self.n_tokens_waiting = 0
        self.closed = False
        """The last message is in: nothing more comes."""
        self._waiting: deque[Wrote | p.AnyAnswer] = deque()
        self._next: tuple[p.AnyAnswer, int] | None = None
        self._moved_at = now
        self._tokens_waiting_max = tokens_waiting_max

    @property
    def over(self) -> bool:
        """Everything was said and sent."""
        return self.closed and not self._waiting

    @property
    def overfull(self) -> bool:
        """More waits than may."""
        return self.n_tokens_waiting > self._tokens_waiting_max

    def stalled_s(self, now: float) -> float:
        """For how long something waits and nothing leaves."""
        return now - self._moved_at if self._waiting else 0.0

    def grant(self, credit: int) -> None:
        """The client takes so many more tokens."""
        self.credit += credit

    # --- in

    def put(self, message: p.AnyAnswer, now: float) -> None:
        """Queue a message. Newer progress replaces what still waits of older."""
        last = self._waiting[-1] if self._waiting else None
        if isinstance(message, p.Queued | p.ReadingPrompt) and type(last) is type(message):
            self._waiting.pop()
            self._next = None
        self._add(message, now)

    def end(self, message: p.AnyAnswer, now: float) -> None:
        """Queue the last message, once; what is put later is late and dropped."""
        if not self.closed:
            self._add(message, now)
            self.closed = True

    def break_off(self, message: p.AnyAnswer, now: float) -> int:
        """Drop everything that waits and end with `message`; returns how many tokens were dropped."""
        n_dropped = self.n_tokens_waiting
        self._waiting.clear()
        self._next, self.n_tokens_waiting, self.closed = None, 0, False
        self.end(message, now)
        return n_dropped

    def push(self, pieces: Iterable[Piece], now: float, report: Report) -> None:
        """Queue what the host said. A Broken is not for here: its error ends the request."""
        for piece in pieces:
            match piece:
                case Waiting(ahead=ahead):
                    self.put(p.Queued(id=self.id, ahead=ahead), now)
                case Reading(tokens_done=done, tokens_total=total):
                    self.put(p.ReadingPrompt(id=self.id, tokens_done=done, tokens_total=total), now)
                case Wrote():
                    self._add(piece, now)
                    self.n_tokens_waiting += 1
                case ChoiceEnded():
                    self._rest(piece, now)
                    self.put(p.ChoiceFinished(id=self.id, choice=piece.choice, reason=piece.reason), now)
                case Ended():
                    self._rest(piece, now)
                    self.end(
                        p.Finished(
                            id=self.id,
                            choice=piece.choice,
                            reason=piece.reason,
                            usage=piece.usage.body(),
                            report=report(piece),
                        ),
                        now,
                    )

    def _rest(self, piece: ChoiceEnded | Ended, now: float) -> None:
        """What was held back to the end of a choice; its tokens have cost their credit already."""
        if piece.text or piece.token_ids:
            self.put(self._worded([piece], n_tokens=0), now)

    def _add(self, item: Wrote | p.AnyAnswer, now: float) -> None:
        if self.closed:
            return
        if not self._waiting:
            self._moved_at = now
        self._waiting.append(item)

    # --- out

    def peek(self) -> p.AnyAnswer | None:
        """The message that may leave now; None when there is none, or no credit for it."""
        if self._next is None and self._waiting:
            first = self._waiting[0]
            if not isinstance(first, Wrote):
                self._next = first, 1
            elif self.credit > 0:
                wrote = self._alike(first, min(self.credit, PUBLIC_PIECE_TOKENS_MAX))
                self._next = self._worded(wrote, n_tokens=len(wrote)), len(wrote)
        return self._next[0] if self._next else None

    def sent(self, now: float) -> None:
        """What `peek` gave has left."""
        assert self._next is not None
        message, n_items = self._next
        for _ in range(n_items):
            self._waiting.popleft()
        if isinstance(message, p.PieceWritten):
            self.credit -= message.n_tokens
            self.n_tokens_waiting -= message.n_tokens
        self._next, self._moved_at = None, now

    def _alike(self, first: Wrote, n_max: int) -> list[Wrote]:
        """The tokens at the front that can be one message: those of one choice."""
        front = itertools.islice(self._waiting, n_max)
        return [
            item
            for item in itertools.takewhile(
                lambda item: isinstance(item, Wrote) and item.choice == first.choice, front
            )
            if isinstance(item, Wrote)
        ]

    def _worded(self, parts: list[Any], *, n_tokens: int) -> p.PieceWritten:
        told = [token for part in parts for token in part.told]
        return p.PieceWritten(
            id=self.id,
            choice=parts[0].choice,
            text="".join(part.text for part in parts),
            n_tokens=n_tokens,
            token_ids=tuple(token_id for part in parts for token_id in part.token_ids),
            logprobs=chat_logprobs(told)["content"] if told else None,
        )

"""The table of running requests: messages of the host in, pieces of answers out, and what must be said to the host.

Pure: no socket, no task, and the clock is handed in. host.py sends what this file says to send; server.py takes the
pieces. One Stream is one request; it ends exactly once, with Ended or Broken, and says nothing afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from common.errors import LinkDeadlineError, LocalProtocolError, OutriggerError, ServiceError
from common.limits import TOKEN_CREDIT
from common.wire import messages as m
from services.gateway.answers import Usage
from services.gateway.choices import Choice, FinishReason, TokenTold
from services.gateway.failures import HostFailure

GRACE_S = 5.0
"""How long after its deadline the host may still say so itself, before the gateway gives a request up."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """The request is queued behind `ahead` others."""

    ahead: int


@dataclass(frozen=True, slots=True)
class Reading:
    """So many tokens of the prompt are read."""

    tokens_done: int
    tokens_total: int


@dataclass(frozen=True, slots=True)
class Wrote:
    """One token was generated; `text` is what it allows to send (often its own text, sometimes nothing).

    `token_ids` are the tokens whose whole text is out now, `told` what is told of them to who asked for it.
    """

    text: str
    choice: int = 0
    told: tuple[TokenTold, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ChoiceEnded:
    """One choice of several is complete while others go on; `text` is what was still held back."""

    text: str
    reason: FinishReason
    choice: int
    told: tuple[TokenTold, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer is complete, with the choice that ended last; `text` is what was still held back of it."""

    text: str
    reason: FinishReason
    usage: Usage
    """Of all choices together; the prompt counts once."""
    report: m.ReadReport
    choice: int = 0
    told: tuple[TokenTold, ...] = ()
    token_ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Broken:
    """The answer will not be completed."""

    error: OutriggerError


Piece = Waiting | Reading | Wrote | ChoiceEnded | Ended | Broken


@dataclass(slots=True)
class Stream:
    """One request between host and client. Consumers call `take`; only the table feeds it."""

    request_id: str
    n_prompt: int
    expires_at: float
    choices: list[Choice]
    wake: Callable[[], None]
    """Called whenever there is something to take."""
    pieces: deque[Piece] = field(default_factory=deque)
    n_ungranted: int = 0
    over: bool = False

    def give(self, piece: Piece) -> None:
        """Queue a piece for the consumer; a newer progress replaces one that nobody took."""
        if isinstance(piece, Reading | Waiting) and self.pieces and type(self.pieces[-1]) is type(piece):
            self.pieces[-1] = piece
        else:
            self.pieces.append(piece)
        self.over = self.over or isinstance(piece, Ended | Broken)
        self.wake()


class RequestTable:
    """All streams by request id."""

    def __init__(
        self,
        piece_of: Callable[[int], bytes],
        end_ids: frozenset[int],
        spell: Callable[[int], bytes] | None = None,
    ) -> None:
        """`piece_of`: the bytes a token adds to a text; `end_ids`: the ids that end an answer.

        `spell`: how a token is written, control tokens included; for telling log-probabilities.
        """
        self._piece_of = piece_of
        self._spell = spell or piece_of
        self.end_ids = tuple(sorted(end_ids))
        """What a Generate names as stop tokens."""
        self._end_ids = end_ids
        self._streams: dict[str, Stream] = {}

    def __len__(self) -> int:
        return len(self._streams)

    def open(
        self,
        request_id: str,
        *,
        n_prompt: int,
        stops: Sequence[str],
        expires_at: float,
        wake: Callable[[], None],
        n_choices: int = 1,
    ) -> Stream:
        """A new stream; its Generate is sent with TOKEN_CREDIT. Raises LocalProtocolError for an id that runs."""
        if request_id in self._streams:
            raise LocalProtocolError(f"request {request_id} runs already")
        choices = [Choice(index, stops, self._text_bytes, self._spell) for index in range(n_choices)]
        stream = Stream(request_id, n_prompt, expires_at, choices, wake)
        self._streams[request_id] = stream
        return stream

    def _text_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._end_ids else self._piece_of(token_id)

    def close(self, stream: Stream) -> list[m.Message]:
        """The consumer leaves. What the host must be told: to stop, unless the stream is over."""
        if self._streams.pop(stream.request_id, None) is None or stream.over:
            return []
        return [m.Cancel(stream.request_id)]

    def take(self, stream: Stream) -> tuple[list[Piece], list[m.Message]]:
        """Everything there is for the consumer, and the credit the host gets for it."""
        pieces = list(stream.pieces)
        stream.pieces.clear()
        stream.n_ungranted += sum(isinstance(piece, Wrote) for piece in pieces)
        if stream.over or stream.n_ungranted < TOKEN_CREDIT // 2:
            return pieces, []
        grant = m.GrantTokens(stream.request_id, stream.n_ungranted)
        stream.n_ungranted = 0
        return pieces, [grant]

    def apply(self, message: m.Message) -> list[m.Message]:
        """Take in one message of the host; returns what to send back.

        A message for a request that ended already is late, not wrong.
        """
        stream = self._streams.get(getattr(message, "request_id", ""))
        if stream is None or stream.over:
            return []
        match message:
            case m.Queued(ahead=ahead):
                stream.give(Waiting(ahead))
            case m.PrefillAdvanced(tokens_done=done, tokens_total=total):
                stream.give(Reading(done, total))
            case m.TokenReady():
                return self._token(stream, message)
            case m.ChoiceFinished():
                if choice := self._complete(stream, message):
                    self._end_choice(stream, choice, message.reason)
            case m.Finished():
                if choice := self._complete(stream, message):
                    self._finish(stream, choice, message)
            case m.Failed(code=code, detail=detail):
                stream.give(Broken(HostFailure(code, detail)))
        return []

    def _token(self, stream: Stream, ready: m.TokenReady) -> list[m.Message]:
        choice = stream.choices[ready.choice] if 0 <= ready.choice < len(stream.choices) else None
        if choice is None or ready.index != choice.n_received:
            place = choice.n_received if choice else ready.index
            stream.give(
                Broken(ServiceError(f"token {place} of the answer was lost on the way from the host"))
            )
            return [m.Cancel(stream.request_id)]
        was_stopped = choice.stopped
        out = choice.push(ready.token_id, ready.logprobs)
        if was_stopped:
            stream.n_ungranted += 1  # the other choices draw on the same credit
            return []
        stream.give(Wrote(out.text, choice.index, out.told, out.token_ids))
        if not choice.stopped:
            return []
        return [m.Cancel(stream.request_id, choice.index if len(stream.choices) > 1 else None)]

    def _complete(self, stream: Stream, end: m.ChoiceFinished | m.Finished) -> Choice | None:
        """The choice that ended, if all of it came; otherwise the stream is broken."""
        choice = stream.choices[end.choice] if 0 <= end.choice < len(stream.choices) else None
        if choice is None or choice.n_received != end.n_generated:
            n_lost = end.n_generated - (choice.n_received if choice else 0)
            stream.give(Broken(ServiceError(f"{n_lost} tokens were lost on the way")))
            return None
        if end.reason == "cancelled" and not choice.stopped:
            stream.give(Broken(ServiceError("the host cancelled this request (it drains, or was told to)")))
            return None
        return choice

    def _end_choice(self, stream: Stream, choice: Choice, reason: str) -> None:
        out = choice.end()
        stream.give(ChoiceEnded(out.text, choice.reason(reason), choice.index, out.told, out.token_ids))

    def _finish(self, stream: Stream, choice: Choice, finished: m.Finished) -> None:
        """The end of the whole answer; choices that a stop string ended at the same time end just before it."""
        for other in stream.choices:
            if other is not choice and not other.ended:
                self._end_choice(stream, other, "stop")
        out = choice.end()
        n_generated = sum(each.n_counted for each in stream.choices)
        usage = Usage(finished.n_prompt, n_generated, finished.report.tokens_cache)
        reason = choice.reason(finished.reason)
        stream.give(Ended(out.text, reason, usage, finished.report, choice.index, out.told, out.token_ids))

    def break_all(self, cause: str) -> None:
        """The host's life ended (or messages of it were lost): every running stream ends with an error."""
        for stream in self._running():
            stream.give(Broken(ServiceError(cause)))

    def expire(self, now: float) -> list[m.Message]:
        """Ends the streams whose deadline passed without a word from the host; returns what to send."""
        late = [stream for stream in self._running() if now > stream.expires_at + GRACE_S]
        for stream in late:
            stream.give(Broken(LinkDeadlineError("the request did not end before its deadline")))
        return [m.Cancel(stream.request_id) for stream in late]

    def _running(self) -> Iterable[Stream]:
        return [stream for stream in self._streams.values() if not stream.over]

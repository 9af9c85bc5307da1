"""The table of running requests: messages of the host in, pieces of answers out, and what must be said to the host.

Pure: no socket, no task, and the clock is handed in. host.py sends what this file says to send; server.py takes the
pieces. One Stream is one request; it ends exactly once, with Ended or Broken, and says nothing afterwards.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from common.errors import LinkDeadlineError, LocalProtocolError, OutriggerError, ServiceError
from common.limits import TOKEN_CREDIT
from common.wire import messages as m
from services.gateway.answers import FinishReason, Usage
from services.gateway.failures import HostFailure
from services.gateway.text import TextStream

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
    """One token was generated; `text` is what it allows to send (often its own text, sometimes nothing)."""

    text: str


@dataclass(frozen=True, slots=True)
class Ended:
    """The answer is complete; `text` is what was still held back."""

    text: str
    reason: FinishReason
    usage: Usage
    report: m.ReadReport


@dataclass(frozen=True, slots=True)
class Broken:
    """The answer will not be completed."""

    error: OutriggerError


Piece = Waiting | Reading | Wrote | Ended | Broken


@dataclass(slots=True)
class Stream:
    """One request between host and client. Consumers call `take`; only the table feeds it."""

    request_id: str
    n_prompt: int
    expires_at: float
    text: TextStream
    wake: Callable[[], None]
    """Called whenever there is something to take."""
    pieces: deque[Piece] = field(default_factory=deque)
    n_received: int = 0
    n_counted: int = 0
    """Tokens of the answer: those received until a stop string was complete."""
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

    def __init__(self, piece_of: Callable[[int], bytes], end_ids: frozenset[int]) -> None:
        """`piece_of`: the bytes of a token id; `end_ids`: the ids that end an answer."""
        self._piece_of = piece_of
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
    ) -> Stream:
        """A new stream; its Generate is sent with TOKEN_CREDIT. Raises LocalProtocolError for an id that runs."""
        if request_id in self._streams:
            raise LocalProtocolError(f"request {request_id} runs already")
        stream = Stream(request_id, n_prompt, expires_at, TextStream(stops), wake)
        self._streams[request_id] = stream
        return stream

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
            case m.TokenReady(index=index, token_id=token_id):
                return self._token(stream, index, token_id)
            case m.Finished():
                self._finish(stream, message)
            case m.Failed(code=code, detail=detail):
                stream.give(Broken(HostFailure(code, detail)))
        return []

    def _token(self, stream: Stream, index: int, token_id: int) -> list[m.Message]:
        if index != stream.n_received:
            error = ServiceError(f"token {stream.n_received} of the answer was lost on the way from the host")
            stream.give(Broken(error))
            return [m.Cancel(stream.request_id)]
        stream.n_received += 1
        if stream.text.stopped:  # sent before the host heard of the Cancel
            return []
        stream.n_counted += 1
        data = b"" if token_id in self._end_ids else self._piece_of(token_id)
        stream.give(Wrote(stream.text.push(data)))
        return [m.Cancel(stream.request_id)] if stream.text.stopped else []

    def _finish(self, stream: Stream, finished: m.Finished) -> None:
        if stream.n_received != finished.n_generated:
            stream.give(
                Broken(
                    ServiceError(f"{finished.n_generated - stream.n_received} tokens were lost on the way")
                )
            )
            return
        if finished.reason == "cancelled" and not stream.text.stopped:
            stream.give(Broken(ServiceError("the host cancelled this request (it drains, or was told to)")))
            return
        rest = stream.text.end()
        reason: FinishReason = "length" if finished.reason == "length" and not stream.text.stopped else "stop"
        usage = Usage(finished.n_prompt, stream.n_counted, finished.report.tokens_cache)
        stream.give(Ended(rest, reason, usage, finished.report))

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


def generated_text(pieces: Iterable[Piece]) -> Iterator[str]:
    """The texts in `pieces`, in order, empty ones left out."""
    for piece in pieces:
        if isinstance(piece, Wrote | Ended) and piece.text:
            yield piece.text

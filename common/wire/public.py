"""What foreign programs say to the gateway over ZeroMQ, and hear: typed messages, and their two frames.

    frame 1   the four bytes "OTR1": protocol and version
    frame 2   one msgpack map; its key "type" names the message

docs/zeromq.md describes this for people who write clients in any language, and a test compares it with this file.
Asks are strict: an unknown key is refused by name. Answers and events may gain keys and types within a version, so a
client skips what it does not know. Knows no socket. Used by services.gateway and services.client.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from common.errors import RemoteProtocolError
from common.limits import (
    PUBLIC_BYTES_MAX,
    PUBLIC_CREDIT,
    PUBLIC_CREDIT_MAX,
    PUBLIC_ID_CHARS_MAX,
)

VERSION_FRAME = b"OTR1"
FRAMES = 2

AskId = Annotated[str, Meta(min_length=1, max_length=PUBLIC_ID_CHARS_MAX)]
Credit = Annotated[int, Meta(ge=1, le=PUBLIC_CREDIT_MAX)]


class Ask(msgspec.Struct, frozen=True, tag_field="type", forbid_unknown_fields=True, kw_only=True):
    """Root of what a client says."""


class Generate(Ask, frozen=True, tag="generate", kw_only=True):
    """Read a prompt and write an answer. `body`: the parameters of /v1/chat/completions or /v1/completions."""

    id: AskId
    body: msgspec.Raw
    credit: Credit = PUBLIC_CREDIT
    """Tokens the gateway may send before the client grants more; all choices draw on it."""
    report: bool = False
    """Whether `finished` tells where the answer was computed."""


class Grant(Ask, frozen=True, tag="grant", kw_only=True):
    """The client takes so many more tokens of an answer."""

    id: AskId
    credit: Credit


class Cancel(Ask, frozen=True, tag="cancel", kw_only=True):
    """The client does not want the answer any more."""

    id: AskId


class Tokenize(Ask, frozen=True, tag="tokenize", kw_only=True):
    """Text to token ids. `body`: the parameters of /tokenize."""

    id: AskId
    body: msgspec.Raw


class Detokenize(Ask, frozen=True, tag="detokenize", kw_only=True):
    """Token ids to text. `body`: the parameters of /detokenize."""

    id: AskId
    body: msgspec.Raw


class Status(Ask, frozen=True, tag="status", kw_only=True):
    """How host and worker are."""

    id: AskId


class Ping(Ask, frozen=True, tag="ping", kw_only=True):
    """The client lives; anything else it says counts as well."""

    id: AskId


class Answer(msgspec.Struct, frozen=True, tag_field="type", kw_only=True):
    """Root of what the gateway says to one client."""


class Accepted(Answer, frozen=True, tag="accepted", kw_only=True):
    """The request was checked, and the host has it."""

    id: str
    request_id: str
    """Its name in logs and events."""
    model: str
    seed: int
    n_prompt: int
    """Tokens of the prompt."""
    max_tokens: int
    lease_s: float
    """The client is to say something, if only ping, before so many seconds of silence."""


class Queued(Answer, frozen=True, tag="queued", kw_only=True):
    """The request waits behind `ahead` others; 0: it runs."""

    id: str
    ahead: int


class ReadingPrompt(Answer, frozen=True, tag="reading", kw_only=True):
    """So much of the prompt is read."""

    id: str
    tokens_done: int
    tokens_total: int


class PieceWritten(Answer, frozen=True, tag="piece", kw_only=True):
    """A piece of the answer. It costs `n_tokens` of the request's credit."""

    id: str
    text: str
    """What may be shown now; empty while a code point or a possible stop string is not complete."""
    n_tokens: int
    token_ids: tuple[int, ...] = ()
    """Tokens whose text is out; those of a stop string never come."""
    choice: int = 0
    logprobs: list[dict[str, Any]] | None = None
    """As in the `content` of OpenAI's logprobs; only when the request asked for them."""


class ChoiceFinished(Answer, frozen=True, tag="choice_finished", kw_only=True):
    """One choice of several is complete while others go on."""

    id: str
    choice: int
    reason: str


class Finished(Answer, frozen=True, tag="finished", kw_only=True):
    """The answer is complete, with the choice that ended last. Ends the request."""

    id: str
    reason: str
    """stop or length."""
    usage: dict[str, Any]
    """Of all choices together, as in OpenAI's API."""
    choice: int = 0
    report: dict[str, Any] | None = None


class Cancelled(Answer, frozen=True, tag="cancelled", kw_only=True):
    """The request was cancelled by its client. Ends the request; what was not sent yet is dropped."""

    id: str


class Failed(Answer, frozen=True, tag="error", kw_only=True):
    """It cannot be done, or not to its end. Ends the request; with an empty id it belongs to none."""

    id: str
    status: int
    """As in HTTP: 4xx the client's fault, 5xx ours."""
    kind: str
    message: str
    code: str | None = None
    param: str | None = None
    n_prompt_tokens: int | None = None
    n_ctx: int | None = None


class Tokens(Answer, frozen=True, tag="tokens", kw_only=True):
    """Answer to tokenize."""

    id: str
    tokens: list[int]


class Content(Answer, frozen=True, tag="content", kw_only=True):
    """Answer to detokenize."""

    id: str
    content: str


class StatusTold(Answer, frozen=True, tag="state", kw_only=True):
    """Answer to status: the body of /health."""

    id: str
    state: dict[str, Any]


class Pong(Answer, frozen=True, tag="pong", kw_only=True):
    """Answer to ping. A request of the client's that is not in `ids` has ended, or was lost."""

    id: str
    ids: list[str]
    lease_s: float


class Lost(Answer, frozen=True, tag="lost", kw_only=True):
    """The client read nothing for too long: its requests were cancelled and `n_messages` replies were dropped."""

    n_messages: int


class Alive(Answer, frozen=True, tag="alive", kw_only=True):
    """Means nothing; the gateway looks whether the client is still there."""


class Event(msgspec.Struct, frozen=True, tag_field="type", kw_only=True):
    """Root of what is published. Frames: topic (= type), then the two frames of every message."""

    seq: int
    """Counted per topic; a gap shows how many events a slow subscriber lost."""
    at_s: float
    """Seconds since 1970."""


class RequestStarted(Event, frozen=True, tag="request.started", kw_only=True):
    """A request was checked and handed to the host."""

    request_id: str
    n_prompt: int


class RequestReading(Event, frozen=True, tag="request.reading", kw_only=True):
    """So much of a prompt is read."""

    request_id: str
    tokens_done: int
    tokens_total: int


class RequestEnded(Event, frozen=True, tag="request.ended", kw_only=True):
    """A request is over: stop, length, cancelled, refused, busy, deadline or error."""

    request_id: str
    outcome: str
    total_s: float


class WorkerUp(Event, frozen=True, tag="worker.up", kw_only=True):
    """The worker can take part."""

    device: str
    split_layer: int


class WorkerDown(Event, frozen=True, tag="worker.down", kw_only=True):
    """The worker cannot take part: absent, connecting, resting or refused."""

    state: str
    detail: str


class StatusChanged(Event, frozen=True, tag="status", kw_only=True):
    """State of host and worker; told when it changes, and to everybody whenever somebody subscribes."""

    state: Literal["starting", "ready", "draining", "unavailable"]
    requests_running: int
    requests_waiting: int
    worker: str


AnyAsk = Generate | Grant | Cancel | Tokenize | Detokenize | Status | Ping
AnyAnswer = (
    Accepted
    | Queued
    | ReadingPrompt
    | PieceWritten
    | ChoiceFinished
    | Finished
    | Cancelled
    | Failed
    | Tokens
    | Content
    | StatusTold
    | Pong
    | Lost
    | Alive
)
AnyEvent = RequestStarted | RequestReading | RequestEnded | WorkerUp | WorkerDown | StatusChanged

_encoder = msgspec.msgpack.Encoder()
_asks = msgspec.msgpack.Decoder(AnyAsk)
_answers = msgspec.msgpack.Decoder(AnyAnswer)
_events = msgspec.msgpack.Decoder(AnyEvent)
_any_type = msgspec.msgpack.Decoder(dict[str, msgspec.Raw])
_KNOWN = frozenset(each.__struct_config__.tag for union in (AnyAnswer, AnyEvent) for each in union.__args__)


def encode(message: Ask | Answer | Event) -> list[bytes]:
    """The frames of a message; an event has its topic in front."""
    frames = [VERSION_FRAME, _encoder.encode(message)]
    return [type_of(message).encode(), *frames] if isinstance(message, Event) else frames


def type_of(message: Ask | Answer | Event) -> str:
    """What the key "type" says."""
    return str(type(message).__struct_config__.tag)


def decode_ask(frames: Sequence[Any]) -> AnyAsk:
    """What a client said. Raises RemoteProtocolError; its message says which frame and key, and what is allowed."""
    body = _checked(frames)
    try:
        return _asks.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError) as error:
        raise RemoteProtocolError(
            f"frame 2 is not a message of this protocol: {error or 'nested too deep'}"
        ) from error


def decode_answer(frames: Sequence[Any]) -> AnyAnswer | None:
    """What the gateway said; None for a type of a later version. Raises RemoteProtocolError."""
    return _known(_answers, _checked(frames))


def decode_event(frames: Sequence[Any]) -> AnyEvent | None:
    """What was published, topic first; None for a type of a later version. Raises RemoteProtocolError."""
    return _known(_events, _checked(frames[1:]))


def id_in(frames: Sequence[Any]) -> str:
    """The id of an ask that cannot be read, so that its answer finds home; empty when that is damaged, too."""
    try:
        return msgspec.msgpack.decode(_any_type.decode(_checked(frames))["id"], type=AskId)
    except (RemoteProtocolError, msgspec.MsgspecError, ValueError, RecursionError, KeyError):
        return ""


def decode_body(body: msgspec.Raw) -> Any:
    """The parameters inside an ask. Raises RemoteProtocolError."""
    try:
        return msgspec.msgpack.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError, OverflowError, TypeError) as error:
        raise RemoteProtocolError(f"body is not msgpack: {error or 'nested too deep'}") from error


def _known(decoder: msgspec.msgpack.Decoder[Any], body: memoryview) -> Any:
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        if (kind := _type_in(body)) and kind not in _KNOWN:
            return None
        raise RemoteProtocolError(f"not a message of this protocol: {error}") from error


def _type_in(body: memoryview) -> str:
    try:
        return msgspec.msgpack.decode(_any_type.decode(body)["type"], type=str)
    except (msgspec.MsgspecError, ValueError, RecursionError, KeyError):
        return ""


def _checked(frames: Sequence[Any]) -> memoryview:
    """The second frame, once number, version and length are right."""
    if len(frames) != FRAMES:
        raise RemoteProtocolError(
            f"{len(frames)} frames; a message has {FRAMES}: {VERSION_FRAME.decode()!r} and a msgpack map"
        )
    version, body = memoryview(frames[0]), memoryview(frames[1])
    if version.nbytes != len(VERSION_FRAME) or bytes(version) != VERSION_FRAME:
        shown = bytes(version[:16])
        raise RemoteProtocolError(f"frame 1 is {shown!r}; this gateway speaks {VERSION_FRAME!r}")
    if body.nbytes > PUBLIC_BYTES_MAX:
        raise RemoteProtocolError(f"frame 2 has {body.nbytes} bytes; at most {PUBLIC_BYTES_MAX}")
    return body

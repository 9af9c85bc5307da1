"""The bodies of ZeroMQ asks to requests: the same parameters and refusals as over HTTP, in msgpack instead of JSON.

Pure. What JSON cannot say is refused, so that a body means the same at both doors. Called by public_door.py.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from common.errors import RemoteProtocolError, RequestError, UnsupportedParameterError
from common.wire.public import decode_body
from services.gateway.failures import PublicRefusal
from services.gateway.reading import read_fields
from services.gateway.requests import ChatRequest, CompletionRequest, GenerationRequest

Request = TypeVar("Request", bound=msgspec.Struct)

STREAM_FIELDS = {"stream": (None, True), "stream_options": (None,)}
"""Of HTTP's parameters, those that mean nothing here, with the values that change nothing."""


def read_plain(body: msgspec.Raw, kind: type[Request]) -> Request:
    """The request in the body of a tokenize or detokenize. Raises RequestError."""
    return read_fields(fields_of(body), kind)


def fields_of(body: msgspec.Raw) -> Any:
    """The parameters in a body. Raises RequestError for what is not msgpack, or could not be JSON."""
    try:
        fields = decode_body(body)
    except RemoteProtocolError as error:
        raise PublicRefusal(400, "malformed", str(error), param="body") from error
    _require_plain(fields)
    return fields


def generation_kind(fields: Any) -> type[GenerationRequest]:
    """Whether the parameters are a chat's or a completion's: by `messages` or `prompt`. Raises RequestError."""
    found = [name for name in ("messages", "prompt") if isinstance(fields, dict) and name in fields]
    if len(found) != 1:
        given = " and ".join(found) or "neither"
        raise RequestError(f"body needs either messages or prompt; it has {given}", param="body")
    return ChatRequest if found == ["messages"] else CompletionRequest


def read_generation(fields: dict[str, Any], kind: type[GenerationRequest]) -> GenerationRequest:
    """The request with these parameters. Answers are always streamed here. Raises RequestError."""
    for name, allowed in STREAM_FIELDS.items():
        value = fields.pop(name, None)
        if not any(value is nothing for nothing in allowed):
            raise UnsupportedParameterError(
                f"{name} belongs to HTTP: over ZeroMQ every answer is streamed and ends with its usage; leave it out",
                param=name,
            )
    return read_fields(fields, kind)


def _require_plain(value: Any) -> None:
    """Raises RequestError unless a value is made of what JSON has, too."""
    waiting = [value]
    while waiting:
        value = waiting.pop()
        if isinstance(value, dict):
            if not all(isinstance(key, str) for key in value):
                raise RequestError("the names in body must be strings", param="body")
            waiting.extend(value.values())
        elif isinstance(value, list):
            waiting.extend(value)
        elif not (value is None or isinstance(value, str | int | float)):
            raise RequestError(
                f"body holds a value of kind {type(value).__name__}; use what JSON has, too",
                param="body",
            )

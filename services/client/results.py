"""What the clients share: where the gateway is by default, the shape of its status, and its errors as exceptions.

Pure. Called by asynchronous.py and blocking.py.
"""

from __future__ import annotations

from typing import Any

import msgspec

from common.errors import (
    BusyError,
    ContextExceededError,
    OutriggerError,
    RequestError,
    ServiceError,
    UnsupportedParameterError,
)
from common.wire import public as p

DEFAULT_ENDPOINT = "tcp://127.0.0.1:5570"
DEFAULT_EVENTS_ENDPOINT = "tcp://127.0.0.1:5571"


class WorkerState(msgspec.Struct, frozen=True):
    """The worker as the host sees it."""

    state: str
    detail: str
    device: str
    split_layer: int


class HostState(msgspec.Struct, frozen=True):
    """How the host is; only a host that can compute a token now tells it."""

    status: str
    model: str
    n_ctx: int
    requests_running: int
    requests_waiting: int
    worker: WorkerState


def error_of(failed: p.Failed) -> OutriggerError:
    """The exception of an error message."""
    if failed.code == "context_length_exceeded" and failed.n_prompt_tokens and failed.n_ctx:
        error: OutriggerError = ContextExceededError(failed.n_prompt_tokens, failed.n_ctx)
        error.args = (failed.message,)
        return error
    if failed.code == "unsupported_parameter":
        return UnsupportedParameterError(failed.message, param=failed.param)
    if failed.status == BusyError.status:
        return BusyError(failed.message, param=failed.param)
    if 400 <= failed.status < 500:
        return RequestError(failed.message, param=failed.param)
    return ServiceError(failed.message)


def generate_body(
    messages: list[dict[str, Any]] | None, prompt: str | list[int] | None, parameters: dict[str, Any]
) -> dict[str, Any]:
    """The body of a generate. Raises RequestError unless just one of messages and prompt is given."""
    if (messages is None) == (prompt is None):
        raise RequestError("give either messages or prompt (a text, or token ids)", param="messages")
    return {**({"messages": messages} if prompt is None else {"prompt": prompt}), **parameters}


def as_body(fields: dict[str, Any]) -> msgspec.Raw:
    """Parameters as they travel."""
    return msgspec.Raw(msgspec.msgpack.encode(fields))

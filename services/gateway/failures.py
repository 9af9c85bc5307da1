"""Errors of the HTTP side, errors that come over the bus, and the OpenAI shape of all of them.

Pure. `{"error": {"message", "type", "param", "code"}}` is what every failed request gets, whoever is at fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from common.errors import (
    BusyError,
    ContextExceededError,
    OutriggerError,
    RequestError,
    ServiceError,
    UnsupportedParameterError,
)

INTERNAL = "the server made a mistake while it served this request; its log says more"


class HttpRefusal(RequestError):
    """A request refused for a reason of HTTP's: no such route, wrong method, no key, too large."""

    def __init__(self, status: int, word: str, message: str, *, param: str | None = None) -> None:
        """`word` becomes the OpenAI error code."""
        super().__init__(message, param=param)
        self.status = status
        self.word = word


class PublicRefusal(HttpRefusal):
    """A request refused for a reason of the ZeroMQ door's; its statuses mean what they mean in HTTP."""


class HostFailure(OutriggerError):
    """An error of the host, as it came over the bus: the class of the tree it had there is known by its code."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail)
        original = _BY_CODE.get(code, OutriggerError)
        self.code = code
        self.status = original.status
        self.kind = original.kind


def unknown_model(name: str, served: str) -> HttpRefusal:
    """The request names a model that is not loaded."""
    message = f"the model {name!r} does not exist here; this server runs {served!r}"
    return HttpRefusal(404, "model_not_found", message, param="model")


def status_of(error: BaseException) -> int:
    """The HTTP status of an error."""
    return error.status if isinstance(error, OutriggerError) else 500


def error_body(error: BaseException) -> dict[str, Any]:
    """The OpenAI-shaped body of an error. What is not of our tree is told as an internal error without its text."""
    if not isinstance(error, OutriggerError):
        return _shape(INTERNAL, "server_error", None, "internal_error")
    body = _shape(str(error), error.kind, getattr(error, "param", None), _word(error))
    if isinstance(error, ContextExceededError):
        body["error"] |= {"n_prompt_tokens": error.n_prompt_tokens, "n_ctx": error.n_ctx}
    return body


def _shape(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def _word(error: OutriggerError) -> str | None:
    """OpenAI's error code, a word; ours are numbers and stay on the bus."""
    if isinstance(error, HttpRefusal):
        return error.word
    if isinstance(error, UnsupportedParameterError):
        return "unsupported_parameter"
    if isinstance(error, ContextExceededError):
        return "context_length_exceeded"
    if error.status == BusyError.status:
        return "server_busy"
    if error.status == ServiceError.status:
        return "service_unavailable"
    return None


def _tree(root: type[OutriggerError]) -> Iterator[type[OutriggerError]]:
    yield root
    for child in root.__subclasses__():
        yield from _tree(child)


_BY_CODE = {kind.code: kind for kind in _tree(OutriggerError) if kind.__module__ == "common.errors"}

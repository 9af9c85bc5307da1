"""Who may come in, and that everybody leaves with an OpenAI-shaped body: aiohttp middlewares and body reading.

Knows no route in particular. Without an API key only programs of this machine are served, and a page in a browser that
resolves a foreign name to this machine (DNS rebinding) is turned away by its Host header. Called by server.py.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
import logging
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web
from aiohttp.http_exceptions import HttpProcessingError

from common.errors import OutriggerError, SettingError
from common.log import get_log
from services.gateway.failures import HttpRefusal, error_body, status_of

BODY_WAIT_S = 60.0
"""How long a client may take to send its body."""
ENCODINGS = ("identity", "gzip", "deflate")

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_log = get_log()


def is_loopback(host: str) -> bool:
    """Whether a host name or address can only mean this machine."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host.rstrip(".").lower() == "localhost"


def require_key_off_loopback(http_host: str, api_key: str | None) -> None:
    """Raises SettingError for an address that others can reach without a key."""
    if not api_key and not is_loopback(http_host):
        raise SettingError(
            f"OUTRIGGER_HTTP_HOST = {http_host!r} can be reached from other machines; set OUTRIGGER_API_KEY (clients "
            f"send it as their OpenAI key), or listen on 127.0.0.1"
        )


def quiet_about_clients() -> logging.Logger:
    """aiohttp's logger, without a trace for every client that speaks no HTTP or takes back half of its body."""

    def tell(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        if not isinstance(error, HttpProcessingError | web.RequestPayloadError):
            return True
        _log.info("malformed request", kind=type(error).__name__)
        return False

    logger = logging.Logger("outrigger.gateway.http")
    logger.parent = logging.getLogger()
    logger.addFilter(tell)
    return logger


def json_response(body: object, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """A JSON body as a response."""
    data = msgspec.json.encode(body)
    return web.Response(body=data, status=status, content_type="application/json", headers=headers)


def error_response(error: BaseException, headers: dict[str, str] | None = None) -> web.Response:
    """An error as a response."""
    return json_response(error_body(error), status_of(error), headers)


async def read_body(request: web.Request) -> bytes:
    """The body of a POST. Raises HttpRefusal for a wrong content type, or a body that is too large or too slow."""
    if request.content_type != "application/json":
        raise HttpRefusal(
            415,
            "unsupported_content_type",
            f"Content-Type must be application/json, not {request.headers.get('Content-Type', 'absent')!r}",
        )
    encoding = request.headers.get("Content-Encoding", "identity").lower()
    if encoding not in ENCODINGS:
        raise HttpRefusal(
            415,
            "unsupported_content_encoding",
            f"Content-Encoding must be {' or '.join(ENCODINGS)}, not {encoding!r}",
        )
    try:
        async with asyncio.timeout(BODY_WAIT_S):
            return await request.read()
    except TimeoutError:
        raise HttpRefusal(408, "timeout", f"the body did not arrive within {BODY_WAIT_S:.0f} s") from None
    except web.RequestPayloadError:
        raise HttpRefusal(
            400, "unreadable_body", f"the body cannot be read as its Content-Encoding, {encoding}, says"
        ) from None


@web.middleware
async def answer_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Turns whatever a handler raises into an OpenAI-shaped error."""
    try:
        return await handler(request)
    except OutriggerError as error:
        # Not the message: it may quote what a user wrote.
        _log.info(
            "request refused",
            path=request.path,
            status=status_of(error),
            kind=type(error).__name__,
            param=getattr(error, "param", None),
        )
        headers = {"Retry-After": "1"} if status_of(error) in (429, 503) else None
        return error_response(error, headers)
    except web.HTTPException as error:
        return _http_error(request, error)
    except ConnectionError:
        raise  # the client went while its body was read: nobody is there to answer
    except Exception:
        _log.exception("request failed", path=request.path)
        return error_response(RuntimeError())


def _http_error(request: web.Request, error: web.HTTPException) -> web.Response:
    """aiohttp's own refusals (no route, wrong method, body too large) in our shape."""
    if error.status == 404:
        refusal = HttpRefusal(404, "unknown_url", f"there is no {request.path} here; see /v1/models")
    elif error.status == 405:
        allowed = error.headers.get("Allow", "")
        words = f"{request.path} is asked with {allowed}, not with {request.method}"
        refusal = HttpRefusal(405, "method_not_allowed", words)
        return error_response(refusal, {"Allow": allowed})
    elif error.status == 413:
        refusal = HttpRefusal(413, "body_too_large", f"the body is too large: {error.text or error.reason}")
    else:
        refusal = HttpRefusal(error.status, "http_error", error.text or error.reason)
    return error_response(refusal)


def guard(api_key: str | None, open_paths: frozenset[str]) -> Callable[..., Awaitable[web.StreamResponse]]:
    """A middleware: the key on all but `open_paths`, or a Host that means this machine when there is no key."""
    expected = f"Bearer {api_key}".encode() if api_key else None

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        if expected is None:
            host = request.host.rpartition(":")[0] if _has_port(request.host) else request.host
            if not is_loopback(host):
                raise HttpRefusal(
                    403, "foreign_host", f"this server answers to localhost only, not to {host!r}"
                )
        elif request.path not in open_paths:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, expected):
                raise HttpRefusal(
                    401, "invalid_api_key", "the API key is missing or wrong (Authorization: Bearer KEY)"
                )
        return await handler(request)

    return check


def _has_port(host: str) -> bool:
    return host.rpartition(":")[2].isdigit() and (host.startswith("[") or host.count(":") == 1)

"""Logs: JSON lines, or a line for people on a terminal. An event is a constant phrase; what varies is bound to it.

    log = get_log()                      module level is fine: configuration is read at the first event
    log.info("request finished", tokens=12)
    with bound(request_id="r1"): ...     every event inside, in this task or thread, carries it

Knows no process and opens no file but the stream it is given. `configure_log` is called once, by the skeleton of each
process. Prompts, answers and keys are never logged: `REFUSED_KEYS` takes them out and says that it did.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager, suppress
from typing import Any, TextIO

import structlog

LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
REFUSED_KEYS = frozenset(
    {"prompt", "messages", "text", "content", "secret", "password", "authorization", "api_key"}
)
"""Names of values that could hold what a user wrote, or a secret."""
FIRST_KEYS = ("timestamp", "level", "process", "event")
TEXT_MAX = 2000
"""Longest value in a line: an error from a library may quote megabytes."""


def configure_log(
    process: str, *, level: str = "info", format: str = "auto", stream: TextIO | None = None
) -> None:
    """Start logging as `process` to `stream` (standard error). `format`: json, text, or auto (text on a terminal)."""
    stream = sys.stderr if stream is None else stream
    as_text = format == "text" or (format == "auto" and stream.isatty())
    structlog.configure(
        processors=[
            structlog.contextvars.merge_contextvars,
            _named(process),
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=not as_text),
            structlog.processors.format_exc_info,
            _discreet,
            structlog.dev.ConsoleRenderer(colors=stream.isatty(), pad_event_to=28, sort_keys=False)
            if as_text
            else structlog.processors.JSONRenderer(default=str),
        ],
        wrapper_class=structlog.make_filtering_bound_logger(LEVELS[level]),
        logger_factory=structlog.WriteLoggerFactory(file=Lossy(stream)),  # type: ignore[arg-type]
        cache_logger_on_first_use=False,
    )


class Lossy:
    """A stream whose full disk or closed pipe loses lines, and does not end the program that only wanted to log."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> None:
        with suppress(OSError):
            self._stream.write(text)

    def flush(self) -> None:
        with suppress(OSError):
            self._stream.flush()


def get_log(**values: Any) -> Any:
    """A logger with `values` bound."""
    return structlog.get_logger(**values)


@contextmanager
def bound(**values: Any) -> Iterator[None]:
    """Bind values, such as request_id, to every event of this task or thread until the block ends."""
    with structlog.contextvars.bound_contextvars(**values):
        yield


def _named(process: str) -> Any:
    def add_process(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        event["process"] = process
        return event

    return add_process


def _discreet(_logger: Any, _method: str, event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
    """Take out what must not be logged and cut what is too long."""
    for key, value in event.items():
        if key in REFUSED_KEYS:
            event[key] = "<not logged>"
        elif isinstance(value, str) and len(value) > TEXT_MAX:
            event[key] = f"{value[:TEXT_MAX]}... ({len(value)} characters)"
    # What every line has comes first, so that a column of lines can be read.
    first = {key: event.pop(key) for key in FIRST_KEYS if key in event}
    return {**first, **event}

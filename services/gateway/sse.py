"""Server-sent events: bodies to bytes of a text/event-stream. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

HEADERS = {
    "Content-Type": "text/event-stream; charset=utf-8",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",
}
"""The last one keeps a proxy in front of us from collecting a stream into one answer."""

DONE = b"data: [DONE]\n\n"


def event(body: Any) -> bytes:
    """One event with a JSON body. JSON escapes line breaks, so that it is one line."""
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def comment(text: str) -> bytes:
    """One comment: clients skip it, connections stay awake."""
    return b": " + " ".join(text.splitlines()).encode() + b"\n\n"

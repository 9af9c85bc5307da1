"""What libggml and libllama complain about, kept for error texts instead of printed.

The libraries write warnings and errors through one process-wide callback. The last few lines are kept here, so that
an EngineError or ModelError can say what the library said. Knows nothing else; used by the rest of common/ggml.
"""

from __future__ import annotations

from collections import deque

from .ffi import LOG_CALLBACK, lib

LOG_LEVEL_WARN, LOG_LEVEL_ERROR, LOG_LEVEL_CONTINUED = 3, 4, 5
COMPLAINTS_MAX = 16
COMPLAINTS_SHOWN = 3

_complaints: deque[str] = deque(maxlen=COMPLAINTS_MAX)
_last_level = 0


@LOG_CALLBACK
def keep_complaint(level: int, text: bytes, _user_data: object) -> None:
    """Receives every log line of libggml and libllama; keeps warnings and errors, drops the rest."""
    global _last_level
    if level != LOG_LEVEL_CONTINUED:
        _last_level = level
    line = text.decode("utf-8", "replace").strip()
    if line.strip(".") and _last_level in (LOG_LEVEL_WARN, LOG_LEVEL_ERROR):
        _complaints.append(line)


def forget_complaints() -> None:
    """Empties the store: what is read afterwards was said afterwards."""
    _complaints.clear()


def complaints(otherwise: str) -> str:
    """What the library complained about since, on one line; `otherwise` when it said nothing."""
    return "; ".join(list(_complaints)[-COMPLAINTS_SHOWN:]) or otherwise


lib.ggml_log_set(keep_complaint, None)

"""Log files of the processes: where they are, their last lines, and the line that says why one ended."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

TAIL_BYTES = 64 * 1024
NATIVE_CRASH = "Fatal Python error"


def log_path(run_dir: Path, process: str) -> Path:
    """Log file of a process."""
    return run_dir / f"{process}.log"


def set_aside(run_dir: Path, process: str) -> None:
    """Begin a new log; the last run's stays beside it as NAME.log.previous."""
    path = log_path(run_dir, process)
    if path.exists():
        os.replace(path, path.with_suffix(".log.previous"))


def last_lines(path: Path) -> list[str]:
    """The last lines of a log that are not empty."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            text = file.read().decode("utf-8", "replace")
    except OSError:
        return []
    return [line for line in text.splitlines() if line.strip()]


def last_error(lines: Sequence[str]) -> str:
    """The line that tells best why a process ended: a native crash, its own last words, or its last logged error."""
    for line in reversed(lines):
        if line.startswith(NATIVE_CRASH):
            return line
    events = []
    for line in reversed(lines):
        event = parse_event(line)
        if event is None:
            return line.strip()
        if event.get("level") in ("error", "critical"):
            events.append(event)
    if events:
        return " ".join(str(events[0].get(key, "")) for key in ("event", "error", "exception")).strip()
    return "it ended without a word"


def parse_event(line: str) -> dict[str, object] | None:
    """A JSON log line; None for anything else a process wrote."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None

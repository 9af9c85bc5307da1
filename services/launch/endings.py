"""Why a process ended, in one sentence: from its exit status, the end of its log, and the note it kept of native work.

Pure but for reading these files. The log holds several lives of the process; each begins with a line that names its
pid, and only the lines of the life in question count.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from common.crash_note import read_note
from services.launch.ends import End
from services.launch.logs import last_error, last_lines, log_path

NATIVE_CRASH = "Fatal Python error"
FRAME = re.compile(r'^\s*File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<function>\S+)')
LIFE_BEGINS = "process starting"
UNTOLD = {"SIGKILL": "killed by SIGKILL (by hand, or because memory was short)"}
EXIT_OK = 0


def why_ended(run_dir: Path, end: End, by_us: str = "") -> str:
    """One line for people. by_us: why launch itself ended it, if it did."""
    lines = lines_of_life(last_lines(log_path(run_dir, end.process)), end.pid)
    doing = "; ".join(read_note(run_dir, end.process, end.pid))
    while_doing = f", while {doing}" if doing else ""
    if by_us:
        return f"ended by outrigger: {by_us}{while_doing}"
    if end.signal:
        return f"{UNTOLD.get(end.signal, f'crashed with {end.signal}')}{crash_place(lines)}{while_doing}"
    if end.code == EXIT_OK:
        return "it was told to stop by somebody else"
    return f"{last_error(lines).removeprefix(f'{end.process}: ')} (exit code {end.code})"


def crash_place(lines: Sequence[str]) -> str:
    """Where faulthandler says that a native crash happened: " in compute (backend.py, line 118)"; "" if it does not."""
    crashes = [number for number, line in enumerate(lines) if line.startswith(NATIVE_CRASH)]
    if not crashes:
        return ""
    after = lines[crashes[-1] + 1 :]
    current = [number for number, line in enumerate(after) if line.startswith("Current thread")]
    for line in after[current[0] if current else 0 :]:
        if found := FRAME.match(line):
            return f" in {found['function']} ({Path(found['file']).name}, line {found['line']})"
    return ""


def lines_of_life(lines: Sequence[str], pid: int) -> list[str]:
    """The lines of the life with this pid. It may never have come so far as to begin one: then the last line alone."""
    begins = [(number, life) for number, line in enumerate(lines) if (life := _begun_life(line)) is not None]
    for index, (number, life) in enumerate(begins):
        if life == pid:
            stop = begins[index + 1][0] if index + 1 < len(begins) else len(lines)
            return list(lines[number:stop])
    return list(lines[-1:] if begins else lines)


def _begun_life(line: str) -> int | None:
    """The pid of the life that begins with this line; None for any other line."""
    if LIFE_BEGINS not in line:
        return None
    try:
        event = json.loads(line)
    except ValueError:
        return None
    is_begin = isinstance(event, dict) and event.get("event") == LIFE_BEGINS
    return event["pid"] if is_begin and isinstance(event.get("pid"), int) else None

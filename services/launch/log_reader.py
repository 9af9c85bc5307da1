"""Reads the logs of several processes as one: the last lines, then new ones, in the order of their time.

A line without a time (a native crash, a warning of a library) goes with the one before it in the same file. Rotation
is followed: what was written to the old file before it was set aside is read first. Used by `outrigger logs`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from services.launch.logs import log_path, parse_event

BLOCK_BYTES = 64 * 1024
UNTIMED = ""


@dataclass(frozen=True)
class LogLine:
    """One line of one process's log."""

    process: str
    at: str
    """Its timestamp as written (UTC, ISO 8601, so that text sorts by time); of the line before, when it has none."""
    text: str


def processes_logged(run_dir: Path) -> list[str]:
    """Names of the processes that have a log."""
    return sorted(path.stem for path in run_dir.glob("*.log"))


class LogFile:
    """One process's log, read from its end on."""

    def __init__(self, run_dir: Path, process: str) -> None:
        self._path, self._process = log_path(run_dir, process), process
        self._file: BinaryIO | None = None
        self._rest, self._at = b"", UNTIMED

    def last(self, n_lines: int) -> list[LogLine]:
        """The last lines; what comes later is left for `new`."""
        self._open()
        if self._file is None:
            return []
        content, position = b"", self._file.seek(0, os.SEEK_END)
        while position and content.count(b"\n") <= n_lines:
            start = max(0, position - BLOCK_BYTES)
            self._file.seek(start)
            content, position = self._file.read(position - start) + content, start
        self._file.seek(0, os.SEEK_END)
        # The first piece may be the end of a line that began earlier.
        lines = self._lines(content)
        return lines[-n_lines:] if n_lines else []

    def new(self) -> list[LogLine]:
        """Whole lines written since the last call."""
        self._open()
        if self._file is None:
            return []
        lines = self._lines(self._file.read())
        if self._was_rotated():
            self._file.close()
            self._file = None
            lines += self.new()
        return lines

    def close(self) -> None:
        """Free the descriptor."""
        if self._file is not None:
            self._file.close()

    def _open(self) -> None:
        if self._file is None:
            with suppress(FileNotFoundError):
                self._file = self._path.open("rb")

    def _was_rotated(self) -> bool:
        assert self._file is not None
        try:
            return self._path.stat().st_ino != os.fstat(self._file.fileno()).st_ino
        except FileNotFoundError:
            return False  # set aside a moment ago; the new one is about to appear

    def _lines(self, content: bytes) -> list[LogLine]:
        *whole, self._rest = (self._rest + content).split(b"\n")
        lines = []
        for raw in whole:
            text = raw.decode("utf-8", "replace")
            if not text.strip():
                continue
            event = parse_event(text)
            self._at = str(event.get("timestamp", self._at)) if event else self._at
            lines.append(LogLine(self._process, self._at, text))
        return lines


class LogReader:
    """The logs of `processes` as one."""

    def __init__(self, run_dir: Path, processes: Sequence[str]) -> None:
        self._files = [LogFile(run_dir, process) for process in processes]

    def last(self, n_lines: int) -> list[LogLine]:
        """The last n_lines of all together."""
        lines = _in_order(file.last(n_lines) for file in self._files)
        return lines[-n_lines:] if n_lines else []

    def new(self) -> list[LogLine]:
        """What was written since the last call."""
        return _in_order(file.new() for file in self._files)

    def close(self) -> None:
        """Free the descriptors."""
        for file in self._files:
            file.close()


def _in_order(pieces: Iterator[list[LogLine]]) -> list[LogLine]:
    """By time; lines of one file keep their order."""
    return sorted((line for piece in pieces for line in piece), key=lambda line: line.at)

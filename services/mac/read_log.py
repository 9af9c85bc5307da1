"""The last reads of this process, stage by stage, in a file of its run directory: what `outrigger trace` shows.

One JSON object a line, oldest first; the file is cut to the newest KEPT reads whenever it holds twice as many. Times
and counts only, no text and no tokens. A file that cannot be written is told once and costs no read. Called by
services.mac.host; read by services.bench.timeline.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import msgspec

from common.log import get_log
from common.wire.messages import ReadReport

KEPT = 64
FILE_NAME = "reads.jsonl"

log = get_log()


class LoggedRead(msgspec.Struct, frozen=True):
    """One read as it is kept. `number` counts the reads of a run directory."""

    number: int
    ended_unix_s: float
    model: str
    n_layer: int
    report: ReadReport


class ReadLog:
    """Appends reads to `folder`/reads.jsonl and keeps the newest ones."""

    def __init__(self, folder: Path, model: str, n_layer: int) -> None:
        self.path = folder / FILE_NAME
        self._model, self._n_layer = model, n_layer
        kept = load_reads(self.path)
        self._n_lines = 2 * KEPT  # the first write of a process puts the file in order
        self._next = kept[-1].number + 1 if kept else 1
        self._works = True

    def add(self, report: ReadReport) -> None:
        """Keep one more read."""
        read = LoggedRead(self._next, time.time(), self._model, self._n_layer, report)
        self._next += 1
        try:
            self._write(msgspec.json.encode(read) + b"\n")
        except OSError as error:
            if self._works:
                log.warning(
                    "reads cannot be kept for `outrigger trace`", path=str(self.path), error=str(error)
                )
            self._works = False

    def _write(self, line: bytes) -> None:
        if self._n_lines >= 2 * KEPT:
            newest = load_reads(self.path)[-KEPT:]
            fresh = self.path.with_suffix(".new")
            fresh.write_bytes(b"".join(msgspec.json.encode(read) + b"\n" for read in newest))
            os.replace(fresh, self.path)
            self._n_lines = len(newest)
        with self.path.open("ab") as file:
            file.write(line)
        self._n_lines += 1


def load_reads(path: Path) -> list[LoggedRead]:
    """Reads of a file, oldest first; lines that are damaged or of another version are passed over."""
    try:
        lines = path.read_bytes().splitlines()
    except FileNotFoundError:
        return []
    reads = []
    for line in lines:
        try:
            reads.append(msgspec.json.decode(line, type=LoggedRead))
        except msgspec.DecodeError:
            continue
    return reads

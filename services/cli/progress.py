"""How far a long command is: silent for two seconds, then one line on standard error that is kept up to date.

A terminal sees the line rewritten; a log file gets a new line now and then. Used by the commands that write models.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Self

SILENT_S = 2.0
TERMINAL_PERIOD_S = 0.1
LOG_PERIOD_S = 5.0


class ByteProgress:
    """`with ByteProgress("writing x") as progress: …` and call progress(bytes done, bytes in all) from inside."""

    def __init__(self, what: str) -> None:
        self.what = what
        self._terminal = sys.stderr.isatty()
        self._started_s = self._shown_s = time.monotonic()
        self._shown = False

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        now_s = time.monotonic()
        period_s = TERMINAL_PERIOD_S if self._terminal else LOG_PERIOD_S
        if now_s - self._started_s < SILENT_S or (self._shown and now_s - self._shown_s < period_s):
            return
        self._shown, self._shown_s = True, now_s
        share = done_bytes / max(total_bytes, 1)
        left_s = (now_s - self._started_s) * (1 - share) / max(share, 1e-9)
        line = f"{self.what}: {share:4.0%} of {total_bytes / 1e6:.0f} MB, {left_s:.0f} s left"
        sys.stderr.write(f"\r{line}\x1b[K" if self._terminal else f"{line}\n")
        sys.stderr.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._shown and self._terminal:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

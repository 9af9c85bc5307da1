"""The one thread that never waits for the rest of its process: it hears signals and notices that the parent is gone.

A signal is written to a pipe by the interpreter's C handler, whatever the main thread does, and read here. The first
one, or the end of the parent, asks for a stop; a second one asks to hurry, where that means something; one more, or a
stop that takes longer than `stop_s`, ends the process at once. Knows nothing of what is stopped. Started by
services.runtime.service and by services.launch.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable

PARENT_VARIABLE = "OUTRIGGER_PARENT_PID"
"""Set by whoever starts a process that must not outlive it."""
PARENT_LOOK_S = 0.5
STOP_S = 1.7
"""From asking to leaving by force: a supervisor that waits 2 s never has to kill."""
EXIT_FORCED = 1


class Guard:
    """`ask_stop(reason)` and `hurry()` are called once, from the guard's thread. Made, started in the main thread."""

    def __init__(
        self,
        process: str,
        ask_stop: Callable[[str], None],
        *,
        parent_pid: int | None = None,
        stop_s: float = STOP_S,
        hurry: Callable[[], None] | None = None,
    ) -> None:
        self.stop_s = stop_s
        """Longest stop. May be changed as long as no stop was asked."""
        self._process = process
        self._ask_stop = ask_stop
        self._hurry = hurry
        self._parent_pid = parent_pid
        self._asked_at: float | None = None
        self._done = threading.Event()
        self._wake_read, self._wake_write = os.pipe()
        os.set_blocking(self._wake_write, False)
        self._thread = threading.Thread(target=self._watch, name="guard", daemon=True)

    def start(self) -> None:
        """Take over SIGTERM and SIGINT and begin to watch."""
        for number in (signal.SIGTERM, signal.SIGINT):
            # Without a handler the default action would end the process; the work is done where the pipe is read.
            signal.signal(number, lambda *_: None)
        self._old_fd = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        self._thread.start()

    def finish(self) -> None:
        """The process stops by itself: no more watching, default signals again."""
        self._done.set()
        os.write(self._wake_write, b"\0")
        self._thread.join()
        signal.set_wakeup_fd(self._old_fd)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_DFL)
        os.close(self._wake_read)
        os.close(self._wake_write)

    def _watch(self) -> None:
        while not self._done.is_set():
            ready, _, _ = select.select([self._wake_read], [], [], self._next_look_s())
            if ready:
                for number in os.read(self._wake_read, 64):
                    self._heard(number)
            if self._parent_pid is not None and os.getppid() != self._parent_pid:
                self._stop(f"the process that started this one (pid {self._parent_pid}) is gone")
            if self._asked_at is not None and time.monotonic() - self._asked_at > self.stop_s:
                self._leave(f"did not stop in {self.stop_s:g} s")

    def _next_look_s(self) -> float | None:
        if self._asked_at is not None:
            return max(0.0, self._asked_at + self.stop_s - time.monotonic()) + 0.01
        return None if self._parent_pid is None else PARENT_LOOK_S

    def _heard(self, number: int) -> None:
        if number not in (signal.SIGTERM, signal.SIGINT):
            return
        if self._asked_at is None:
            self._stop(f"{signal.Signals(number).name} received")
        elif self._hurry is not None:
            hurry, self._hurry = self._hurry, None
            hurry()
        else:
            self._leave("was told again to stop")

    def _stop(self, reason: str) -> None:
        if self._asked_at is None:
            self._asked_at = time.monotonic()
            self._ask_stop(reason)

    def _leave(self, why: str) -> None:
        if self._done.is_set():
            return
        sys.stderr.write(f"{self._process} {why} and left at once\n")
        sys.stderr.flush()
        os._exit(EXIT_FORCED)


def parent_pid_in(environ: dict[str, str] | os._Environ[str]) -> int | None:
    """The parent that must live on, when one was named."""
    text = environ.get(PARENT_VARIABLE, "")
    return int(text) if text.isdigit() else None

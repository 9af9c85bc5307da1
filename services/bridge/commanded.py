"""CommandedThread: a thread that moves data in steps and takes commands from others between them.

Its sockets belong to it alone, so nothing in a step is locked: another thread hands over a command and wakes it.
Base of the bridge's two data threads (pump.py, page_pump.py).
"""

from __future__ import annotations

import socket
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from contextlib import suppress

from common.log import get_log

log = get_log()


class CommandedThread(ABC, threading.Thread):
    """A subclass says what a step is, and how it ends."""

    def __init__(self, name: str, ended: Callable[[], None]) -> None:
        """ended is called on the thread at its end, whatever ended it."""
        super().__init__(name=name, daemon=True)
        self._ended = ended
        self._wake, self._waker = socket.socketpair()
        self._commands: deque[Callable[[], None]] = deque()
        self._running = True
        self.turns = 0
        """Grows with every turn of the thread."""

    def stop(self, timeout_s: float) -> None:
        """End the thread; what is at hand is answered."""
        self._command(self._end)
        self.join(timeout_s)
        if not self.is_alive():
            self._wake.close()
            self._waker.close()

    def run(self) -> None:
        """Steps until somebody ends it."""
        try:
            while self._running:
                self.turns += 1
                self._step()
        except BaseException:
            log.exception(f"{self.name} failed")
            raise
        finally:
            self._close_sockets()
            self._ended()

    def _command(self, do: Callable[[], None]) -> None:
        """Any thread: have this one do something. After its end nobody does."""
        self._commands.append(do)
        with suppress(OSError):  # the thread has ended
            self._waker.send(b"\0")

    def _obey(self, *, woken: bool) -> None:
        """On the thread: do what others asked. woken: `_wake` can be read."""
        if woken:
            self._wake.recv(4096)
        while self._commands:
            self._commands.popleft()()

    @abstractmethod
    def _step(self) -> None:
        """Waits for what there is to do, and for `_wake`; does it, and obeys."""

    @abstractmethod
    def _close_sockets(self) -> None:
        """On the thread, at its end."""

    @abstractmethod
    def _end(self) -> None:
        """On the thread: answers what is at hand and clears `_running`."""

"""The life of the worker's process: the states and endings of every process of the house, without a bus.

    def body(life: Life) -> None:
        ...load, listen...
        life.ready(port=50060)
        life.stopping.wait()                  # SIGTERM, SIGINT, or the parent is gone
        ...end clients...

    raise SystemExit(live(settings, body))

The body runs on a thread of its own, so that the main thread hears signals and looks after the parent whatever native
code the body is in: also in the middle of a load or a chunk the process leaves within two seconds. How far it is, is
told by the control channel. Knows nothing of what a worker does; used by device.worker.
"""

from __future__ import annotations

import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Literal

from common.config import Settings
from common.crash_note import CrashNote, Slot
from common.errors import OutriggerError, SettingError
from common.log import get_log

PROCESS = "worker"
PARENT_VARIABLE = "OUTRIGGER_PARENT_PID"
"""Set by a process that starts a worker which must not outlive it."""
PARENT_LOOK_S = 0.5
STOP_S_MAX = 1.7
"""A body that has not ended so long after a stop is abandoned with the process: it is inside a kernel."""
EXIT_OK, EXIT_FAILED, EXIT_SETTING = 0, 1, 2

State = Literal["starting", "ready", "draining", "stopped"]

log = get_log()


class Life:
    """What the body is given: how far it is, when to stop, and where to say what native code it enters."""

    def __init__(self, note: CrashNote | None) -> None:
        self.state: State = "starting"
        self.stopping = threading.Event()
        self.error: BaseException | None = None
        self._note = note

    def crash_slot(self) -> Slot:
        """For each thread that calls native code."""
        return self._note.slot() if self._note else Slot()

    def ready(self, **facts: Any) -> None:
        """Everything is loaded and bound."""
        self.move("ready", **facts)

    def move(self, state: State, **facts: Any) -> None:
        """Go to `state` and log it."""
        self.state = state
        log.info(f"process {state}", **facts)


def live(settings: Settings, body: Callable[[Life], None]) -> int:
    """Live one life; returns its exit code. Call in the main thread, with the log configured."""
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # what launch sends before it ends a process that is stuck
    parent_pid = _parent_pid()
    note = None
    if parent_pid is not None and settings.run_dir.is_dir():  # somebody watches, and will read it
        note = CrashNote(settings.run_dir, PROCESS, os.getpid())
    life = Life(note)
    life.move("starting", pid=os.getpid())
    code = _watch(life, body, parent_pid)
    if note is not None:
        note.remove()
    return code


def _watch(life: Life, body: Callable[[Life], None], parent_pid: int | None) -> int:
    """Run the body on a thread, and be there for signals and for the parent's end."""
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # the default would end the process; the pipe below is read
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)

    def run() -> None:
        try:
            body(life)
        except BaseException as error:
            life.error = error
        finally:
            os.write(wake_write, b"\0")

    thread = threading.Thread(target=run, name="body", daemon=True)
    thread.start()
    look_s = None if parent_pid is None else PARENT_LOOK_S
    stop_at: float | None = None
    while thread.is_alive() and (stop_at is None or time.monotonic() < stop_at):
        left_s = look_s if stop_at is None else max(0.0, stop_at - time.monotonic())
        ready, _, _ = select.select([wake_read], [], [], left_s)
        numbers = os.read(wake_read, 64) if ready else b""
        reason = _reason_to_stop(numbers, parent_pid)
        if numbers and not numbers.strip(b"\0"):
            thread.join(0.1)  # the body has ended, or is about to
        if reason and stop_at is None:
            log.info("stop asked", reason=reason)
            life.state = "draining"
            stop_at = time.monotonic() + STOP_S_MAX
            life.stopping.set()
    return _end(life)


def _reason_to_stop(numbers: bytes, parent_pid: int | None) -> str:
    heard = [number for number in numbers if number in (signal.SIGTERM, signal.SIGINT)]
    if heard:
        return f"{signal.Signals(heard[0]).name} received"
    if parent_pid is not None and os.getppid() != parent_pid:
        return f"the process that started this one (pid {parent_pid}) is gone"
    return ""


def _end(life: Life) -> int:
    """The last line, and the exit code. Threads that are still in native code are left behind.

    An interpreter that ends while one computes, daemon or not, frees what it works on.
    """
    error = life.error
    code = EXIT_OK
    if error is not None:
        code = EXIT_SETTING if isinstance(error, SettingError) else EXIT_FAILED
        if not isinstance(error, OutriggerError):
            log.error("process failed", exc_info=error)
    threads_left = [each.name for each in threading.enumerate() if each is not threading.main_thread()]
    life.move("stopped", threads_left=threads_left)
    if error is not None:
        words = str(error) if isinstance(error, OutriggerError) else f"{type(error).__name__}: {error}"
        sys.stderr.write(f"{PROCESS}: {' '.join(words.split())}\n")
    sys.stdout.flush()
    sys.stderr.flush()
    if threads_left:
        os._exit(code)
    return code


def _parent_pid() -> int | None:
    text = os.environ.get(PARENT_VARIABLE, "")
    return int(text) if text.isdigit() else None

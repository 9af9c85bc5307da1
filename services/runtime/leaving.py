"""The end of a process: why, in one line and an exit code, and not waiting for threads that do not hear.

Used by services.runtime.service at the end of every process of the host.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

from common.errors import LinkError, OutriggerError, SettingError
from common.log import get_log

EXIT_FAILED = 1
EXIT_SETTING = 2
THREADS_S = 0.3
"""How long a process that is over waits for its threads; one in native code (loading a model) does not hear."""

log = get_log()


def one_line(error: BaseException) -> str:
    """An error as one line for people."""
    text = " ".join(str(error).split()) or "no further words"
    return text if isinstance(error, OutriggerError) else f"{type(error).__name__}: {text}"


def report_failure(process: str, error: BaseException) -> int:
    """Say why a process ends, on standard error, as its last line; returns the exit code.

    An error of ours is a sentence already. Anything else is a bug, and its trace goes to the log first.
    """
    if not isinstance(error, OutriggerError):
        log.error("process failed", exc_info=error)
    elif isinstance(error, LinkError):
        log.error("process failed", cause=error.cause)
    sys.stderr.write(f"{process}: {one_line(error)}\n")
    sys.stderr.flush()
    return EXIT_SETTING if isinstance(error, SettingError) else EXIT_FAILED


def threads_ended(pool: ThreadPoolExecutor) -> bool:
    """End the threads of a pool and wait a moment for all others; False when one of them does not hear.

    Daemon threads count, too: an interpreter that ends frees what a thread in native code still works on.
    """
    pool.shutdown(wait=False, cancel_futures=True)
    give_up_at = time.monotonic() + THREADS_S
    for thread in threading.enumerate():
        if thread is not threading.current_thread():
            thread.join(max(0.0, give_up_at - time.monotonic()))
            if thread.is_alive():
                return False
    return True


def leave(code: int) -> NoReturn:
    """End the process although a thread still computes: the interpreter would wait for it."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

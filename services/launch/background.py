"""A launch in the background: started, so that it outlives the terminal, and ended from elsewhere.

`start` runs the very same `outrigger run` in a session of its own and repeats what it says until it is ready; `stop`
asks whatever launch holds the run directory to end, and makes sure that it did. Called by the commands up and down.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import services
from common.config import Settings, to_environ
from common.errors import ServiceError
from services.launch.launch import STOP_S_MAX
from services.launch.lock import LOCK, already_text, is_held, read_note, running
from services.runtime.run_dir import open_run_dir

OUT = "launch.out"
"""What the launch in the background says: its standard output and error."""
SUPERVISOR_LOCK = "supervisor.lock"
EXIT_OK = 0
EXIT_INTERRUPTED = 130
LOOK_S = 0.05
TOLD_S = 0.5
LEFT_S_MAX = 10.0
"""What a killed launch leaves behind is gone after so long."""


def start(settings: Settings, say: Callable[[str], None]) -> int:
    """Start everything in the background; returns 0 when it serves, else the launch's own exit code.

    Raises ServiceError when something runs in this run directory already.
    """
    run_dir = open_run_dir(settings.run_dir)
    if running(run_dir) is not None:
        raise ServiceError(already_text(run_dir))
    out = run_dir / OUT
    root = str(Path(services.__file__).parents[1])
    path = os.pathsep.join(part for part in (root, os.environ.get("PYTHONPATH", "")) if part)
    with out.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, "-m", "services.cli.main", "run", "--background"],
            env={**os.environ, **to_environ(settings), "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    try:
        return _follow(process, run_dir, out, say)
    except KeyboardInterrupt:
        process.terminate()
        process.wait()
        say("stopped before it was ready")
        return EXIT_INTERRUPTED


def _follow(process: subprocess.Popen[bytes], run_dir: Path, out: Path, say: Callable[[str], None]) -> int:
    """Repeat what it says until it serves or has ended."""
    with out.open(encoding="utf-8", errors="replace") as said:
        while True:
            code = process.poll()
            note = read_note(run_dir)
            serves = note.get("pid") == process.pid and note.get("state") == "serving"
            if text := said.read().rstrip("\n"):
                say(text)
            if code is not None:
                return code
            if serves:
                return EXIT_OK
            time.sleep(LOOK_S)


def stop(run_dir: Path, say: Callable[[str], None], *, now: bool) -> int:
    """End the launch that runs here, whoever started it; returns the exit code. now: without waiting for answers."""
    note = running(run_dir)
    if note is None:
        _wait_for_remains(run_dir)
        say(f"nothing runs (run directory {run_dir})")
        return EXIT_OK
    pid, drain_s = note.get("pid"), float(note.get("stop_s_max", 0.0))
    if not isinstance(pid, int):
        raise ServiceError(f"somebody holds {run_dir / LOCK} and does not say who; try again in a moment")
    began_s, told = time.monotonic(), False
    for _ in range(2 if now else 1):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        time.sleep(LOOK_S)
    while is_held(run_dir / LOCK):
        waited_s = time.monotonic() - began_s
        if waited_s > drain_s + STOP_S_MAX:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)  # it was stopped, or hangs; the others notice and leave
            say(f"pid {pid} did not stop in {waited_s:.0f} s and was killed")
            break
        if not told and waited_s > TOLD_S:
            told = True
            say(f"waiting for pid {pid}; answers being written get {drain_s:g} s (--now does not wait)")
        time.sleep(LOOK_S)
    _wait_for_remains(run_dir)
    say(f"stopped (pid {pid}, after {time.monotonic() - began_s:.1f} s)")
    return EXIT_OK


def _wait_for_remains(run_dir: Path) -> None:
    """Return when the supervisor of a killed launch has stopped its processes, too. Raises ServiceError."""
    give_up_at = time.monotonic() + LEFT_S_MAX
    while is_held(run_dir / LOCK) or is_held(run_dir / SUPERVISOR_LOCK):
        if time.monotonic() > give_up_at:
            raise ServiceError(
                f"processes of {run_dir} are still there after {LEFT_S_MAX:g} s; see its *.log"
            )
        time.sleep(LOOK_S)

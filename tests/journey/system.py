"""The whole system as a person starts it: `outrigger run` in a process of its own, on free ports and a private folder.

`running_system()` gives where it listens and stops it like Ctrl-C does. Nothing of it is imported here.
"""

from __future__ import annotations

import os
import queue
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

START_S = 60.0
WAIT_S = 30.0
"""For what must happen: long, because a busy machine is no failure."""

FREE_PORTS = (
    "OUTRIGGER_HTTP_PORT",
    "OUTRIGGER_ZMQ_PORT",
    "OUTRIGGER_ZMQ_EVENTS_PORT",
    "OUTRIGGER_GATEWAY_METRICS_PORT",
    "OUTRIGGER_MAC_METRICS_PORT",
    "OUTRIGGER_BRIDGE_METRICS_PORT",
    "OUTRIGGER_BROKER_METRICS_PORT",
    "OUTRIGGER_LISTEN_PORT",
    "OUTRIGGER_LISTEN_CONTROL_PORT",
)


@dataclass(frozen=True)
class System:
    """A running system."""

    url: str
    """Base of the API, with /v1."""
    run_dir: Path
    process: subprocess.Popen[str]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2].split("/")[0])

    def pid_of(self, process: str) -> int:
        """Process id of a part of this run, by the name it has in `outrigger status`."""
        module = "device.worker" if process == "worker" else f"services.{process}"
        for line in _process_table():
            pid, _, command = line.strip().partition(" ")
            if command.endswith(f"-m {module}") and _runs_in(int(pid), self.run_dir):
                return int(pid)
        raise LookupError(process)


@contextmanager
def running_system(*flags: str, **environ: str) -> Iterator[System]:
    """`outrigger run` with `flags`; ready inside the block, gone after it."""
    run_dir = Path(tempfile.mkdtemp(prefix="outrigger-test-"))
    settings = dict.fromkeys(FREE_PORTS, "0") | {
        "OUTRIGGER_RUN_DIR": str(run_dir),
        "OUTRIGGER_JOURNAL_DIR": str(run_dir / "journal"),
        "OUTRIGGER_CONFIG": "",
        "OUTRIGGER_SPLIT_GUARD": "off",  # on a busy machine a worker may well look too slow
        **environ,
    }
    process = subprocess.Popen(
        [sys.executable, "-m", "services.cli.main", "run", *flags],
        env=os.environ | settings,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield System(_wait_ready(process), run_dir, process)
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        finally:
            process.stdout.close()
            shutil.rmtree(run_dir, ignore_errors=True)


def until(condition: Callable[[], bool], seconds: float = WAIT_S) -> None:
    """Waits for something that must happen."""
    give_up_at = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up_at, "it never happened"
        time.sleep(0.05)


def _wait_ready(process: subprocess.Popen[str]) -> str:
    """Reads what it says until it is ready; returns the URL. Fails with everything it said."""
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in process.stdout:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    said, give_up_at = [], time.monotonic() + START_S
    while time.monotonic() < give_up_at:
        try:
            line = lines.get(timeout=1.0)
        except queue.Empty:
            continue
        if line is None:
            break
        said.append(line)
        if found := re.search(r"ready after .* (http://\S+/v1)", line):
            return found[1]
    process.kill()
    raise AssertionError("outrigger run did not become ready; it said:\n" + "".join(said))


def _process_table() -> list[str]:
    return subprocess.run(
        ["ps", "-axo", "pid=,command="], capture_output=True, text=True, check=True
    ).stdout.split("\n")


def _runs_in(pid: int, run_dir: Path) -> bool:
    """Whether a process belongs to this run: its environment names the run directory (its command does not)."""
    proc = Path(f"/proc/{pid}/environ")
    if proc.exists():
        return str(run_dir).encode() in proc.read_bytes()
    shown = subprocess.run(["ps", "-Ewwp", str(pid)], capture_output=True, text=True, check=True).stdout
    return str(run_dir) in shown

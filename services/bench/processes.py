"""Starts the real processes of one measurement, each on the core it is given, and ends them again.

Free ports, a temporary private run directory, settings handed over whole in the environment. A process that dies is
told with the end of its log. Knows which modules to start and nothing of what they do. Used by services.bench.split and
services.cli.verify.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from common.config import Settings, to_environ
from common.errors import LinkError, ServiceError
from services.runtime.guard import PARENT_VARIABLE

End = TypeVar("End")

LOG_LINES_TOLD = 8
STOP_S = 5.0


def free_port() -> int:
    """A TCP port of loopback that nobody listens on at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def cores() -> list[int]:
    """Cores this process may run on; empty where the system cannot tell (nothing is pinned there)."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []


class Processes:
    """A set of child processes that leave together. Use as a context."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="outrigger-"))
        self._children: dict[str, subprocess.Popen[bytes]] = {}

    def run_dir(self, name: str) -> Path:
        """A private run directory of that name, made when it is not there yet."""
        path = self.folder / name
        path.mkdir(mode=0o700, exist_ok=True)
        return path

    def start(self, name: str, module: str, settings: Settings, core: int | None = None) -> None:
        """Run `python -m module` with exactly these settings, pinned to `core` if one is given."""
        pin: Callable[[], None] | None = None
        if core is not None and hasattr(os, "sched_setaffinity"):
            pin = lambda: os.sched_setaffinity(0, {core})  # noqa: E731
        with self._log(name).open("ab") as log:
            self._children[name] = subprocess.Popen(
                [sys.executable, "-m", module],
                env={**_outside(), **to_environ(settings), PARENT_VARIABLE: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=pin,
            )

    @property
    def pids(self) -> list[int]:
        """Process ids of the children."""
        return [child.pid for child in self._children.values()]

    def pid(self, name: str) -> int:
        """Process id of one child."""
        return self._children[name].pid

    def check(self) -> None:
        """Raise ServiceError if a process has ended by itself."""
        for name, child in self._children.items():
            if (status := child.poll()) is not None:
                raise ServiceError(f"{name} ended with status {status}:\n{self.log_end(name)}")

    def wait_until(self, what: str, true: Callable[[], bool], timeout_s: float = 60.0) -> None:
        """Wait until `true()`; raises ServiceError with the logs' ends when it does not come true."""
        until_s = time.monotonic() + timeout_s
        while not true():
            self.check()
            if time.monotonic() > until_s:
                raise ServiceError(f"waited {timeout_s:g} s for {what}\n{self.log_ends()}")
            time.sleep(0.05)

    def connect(self, what: str, connecting: Callable[[], End], timeout_s: float = 60.0) -> End:
        """What `connecting` returns, once the process answers; until then its connection is refused."""
        made: list[End] = []

        def tried() -> bool:
            with contextlib.suppress(OSError, LinkError):
                made.append(connecting())
            return bool(made)

        self.wait_until(f"{what} to take a connection", tried, timeout_s)
        return made[0]

    def kill(self, name: str) -> None:
        """End a process at once, without letting it say goodbye."""
        child = self._children.pop(name)
        child.kill()
        child.wait()

    def stop(self, *names: str) -> None:
        """Ask processes to end (all of them without names), and make sure that they do."""
        chosen = [self._children.pop(name) for name in names or tuple(self._children)]
        for child in chosen:
            with contextlib.suppress(ProcessLookupError):
                child.terminate()
        for child in chosen:
            try:
                child.wait(STOP_S)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def n_said(self, name: str, text: str) -> int:
        """How often a process's log has `text` so far."""
        return self._log(name).read_text(errors="replace").count(text)

    def log_end(self, name: str) -> str:
        """The last lines a process wrote."""
        lines = self._log(name).read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_LINES_TOLD:])

    def log_ends(self) -> str:
        """The last lines of all processes, and which of them have ended."""
        ends = []
        for name, child in self._children.items():
            status = child.poll()
            ended = "" if status is None else f", ended with status {status}"
            ends.append(f"--- {name}{ended}\n{self.log_end(name)}")
        return "\n".join(ends)

    def _log(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
        shutil.rmtree(self.folder, ignore_errors=True)


def _outside() -> dict[str, str]:
    """Our environment without settings: a measurement does not depend on what somebody exported."""
    return {key: value for key, value in os.environ.items() if not key.startswith("OUTRIGGER_")}

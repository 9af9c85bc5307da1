"""The whole system as a person starts it: `outrigger run` in a process of its own, on free ports and a private folder.

Knows how to start it, ask how it is, and stop it like Ctrl-C does. Used by services.bench.faults.kills,
services.bench.drill and services.bench.soak.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from common.config import Settings, load_settings, to_environ
from common.errors import ServiceError
from services.bench.processes import free_port
from services.bench.scrape import scrape
from services.client import OutriggerClient
from services.launch.inquiry import ask_launch
from services.runtime.guard import PARENT_VARIABLE

START_S_MAX, STOP_S_MAX = 120.0, 30.0
PORTS = (
    "http_port",
    "zmq_port",
    "zmq_events_port",
    "gateway_metrics_port",
    "mac_metrics_port",
    "bridge_metrics_port",
    "broker_metrics_port",
)
SAID_CHARS_MAX = 2000


class RunningSystem:
    """Use as a context: all processes are ready inside, gone after it."""

    def __init__(self, model: Path, *, like: Settings | None = None, **flags: object) -> None:
        """flags: settings by flat name, over those of `like`. Ports stay the same when a process starts again."""
        self.folder = Path(tempfile.mkdtemp(prefix="outrigger-"))
        ports = {name: free_port() for name in PORTS}
        link = {name: free_port() for name in ("listen_port", "listen_control_port", "listen_pages_port")}
        run_dir = self.folder / "run"
        run_dir.mkdir(mode=0o700)
        settings = load_settings(
            None,
            to_environ(like) if like else {},
            {
                "run_dir": str(run_dir),
                "journal_dir": str(self.folder / "journal"),
                "model": str(model),
                **ports,
                **link,
                **flags,
            },
        )
        self.settings = settings
        self.run_dir = settings.run_dir
        self.endpoint = f"tcp://127.0.0.1:{ports['zmq_port']}"
        self._environ = to_environ(settings)
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of `outrigger run` itself."""
        assert self._process is not None
        return self._process.pid

    def pids(self) -> dict[str, int]:
        """Process id by name, of those that run; empty when nobody says."""
        try:
            return {each.process: each.pid for each in ask_launch(self.run_dir).processes if each.pid}
        except ServiceError:
            return {}

    def uptimes_s(self) -> dict[str, float]:
        """Seconds that each process lives, of those that run; empty when nobody says."""
        try:
            return {each.process: each.uptime_s for each in ask_launch(self.run_dir).processes if each.pid}
        except ServiceError:
            return {}

    def value(self, process: str, series: str) -> float:
        """A sample of a process, by its name with labels; 0 where it has none, or while the process is not there."""
        port = getattr(self.settings.metrics, f"{process}_port")
        with suppress(OSError):
            return scrape(port).get(series, 0.0)
        return 0.0

    def client(self) -> OutriggerClient:
        """A client of the gateway's ZeroMQ door."""
        return OutriggerClient(self.endpoint)

    def __enter__(self) -> RunningSystem:
        outside = {key: value for key, value in os.environ.items() if not key.startswith("OUTRIGGER_")}
        with (self.folder / "said").open("wb") as said:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.cli.main", "run"],
                env={**outside, **self._environ, PARENT_VARIABLE: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=said,
            )
        until_s = time.monotonic() + START_S_MAX
        try:
            while "ready after" not in self.said():
                if self._process.poll() is not None or time.monotonic() > until_s:
                    raise ServiceError(
                        f"outrigger run did not become ready:\n{self.said()[-SAID_CHARS_MAX:]}"
                    )
                time.sleep(0.1)
        except BaseException:
            self.__exit__()
            raise
        return self

    def said(self) -> str:
        """What it told so far."""
        return (self.folder / "said").read_text(errors="replace")

    def __exit__(self, *_: object) -> None:
        self.stop()
        self.remove()

    def stop(self) -> None:
        """End all processes, as Ctrl-C does."""
        assert self._process is not None
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(STOP_S_MAX)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def remove(self) -> None:
        """Remove its files."""
        shutil.rmtree(self.folder, ignore_errors=True)

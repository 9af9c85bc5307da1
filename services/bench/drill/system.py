"""A system to strike: the user's own settings on free ports, or with them the worker that the user runs elsewhere.

Knows how to start it, ask it, arm its worker's faults and see whether all of it stands ready. Used by
services.bench.drill.trial and services.bench.soak.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from common.config import Settings
from common.errors import OutriggerError, ServiceError, SettingError
from common.limits import MIB
from services.bench.drill.journal import look_at
from services.bench.faults.far_end import FarEnd
from services.bench.faults.footprint import Footprint, footprints
from services.bench.faults.system import RunningSystem
from services.bench.scrape import scrape
from services.client import OutriggerClient, PieceWritten, ReadingPrompt
from services.launch.lock import running

REST_S, ANSWER_S_MIN = 0.2, 2.0
LEASE_S = 20.0
"""A client that left is forgotten after so long."""
N_CTX_MAX = 4096
LOOK_S = 0.1
SUPERVISOR = "services.launch.supervisord"
"""The one process between `outrigger run` and the others."""
ZERO_AT_REST = {
    "mac": ("outrigger_requests_running", "outrigger_requests_waiting", "outrigger_journal_lag_pages"),
    "broker": ("outrigger_journal_lag_seconds",),
}
PAST_THE_LIMIT: dict[str, object] = {
    "kv_host_tokens": 1024,
    "kv_host_bytes": 0,
    "page_tokens": 128,
    "group_pages": 2,
    "shadow_every": 100,
    "journal_mib": 512,
}
"""Settings with which a conversation of some thousand tokens is past the host's limit."""


@dataclass(frozen=True)
class Told:
    """An answer, and what its report says."""

    token_ids: tuple[int, ...]
    seconds: float
    report: dict[str, Any]


class Struckable:
    """Use as a context. own_worker: started here, on an emulated link that takes faults."""

    def __init__(self, model: Path, settings: Settings, emulate: str = "loopback", **more: object) -> None:
        """more: settings by flat name. Raises SettingError when these settings name no worker that could be lost."""
        check_drillable(settings)
        self.own_worker = not settings.bridge.worker_host
        flags: dict[str, object] = {
            "n_ctx": min(N_CTX_MAX, settings.host.n_ctx),
            "worker_rest_s": REST_S,
            "answer_s_min": ANSWER_S_MIN,
            "split_guard": "off",
            "split_tokens_min": 512,
            "zmq_lease_s": LEASE_S,
        }
        flags |= more
        if self.own_worker:
            flags |= {"worker_emulate": emulate, "threads": 1, "worker_threads": 1}
        self.system = RunningSystem(model, like=settings, **flags)
        self.settings = self.system.settings
        self.client: OutriggerClient | None = None
        self.left_behind: list[str] = []
        """What was still there once all was stopped."""

    def __enter__(self) -> Struckable:
        self.system.__enter__()
        self.client = self.system.client()
        return self

    def __exit__(self, *_: object) -> None:
        if self.client:
            self.client.close()
        ours = self.descendants()
        self.system.stop()
        self.left_behind = [f"pid {pid} {text}" for pid, text in ours.items() if psutil.pid_exists(pid)]
        if look_at(Path(self.settings.broker.journal_dir)).is_locked:
            self.left_behind.append("the journal's lock")
        self.system.remove()

    # --- asking

    def ask(
        self,
        prompt: list[int],
        n_tokens: int,
        strike: Callable[[], None] = lambda: None,
        *,
        while_reading: bool = True,
    ) -> Told:
        """Greedy tokens of an answer; `strike` is called once in the middle. Raises what the answer ends with."""
        assert self.client is not None
        token_ids: list[int] = []
        struck, began_s = False, time.monotonic()
        with self.client.generate(prompt=prompt, max_tokens=n_tokens, temperature=0, report=True) as answer:
            for update in answer.updates():
                if isinstance(update, PieceWritten):
                    token_ids += update.token_ids
                if not struck and isinstance(update, ReadingPrompt if while_reading else PieceWritten):
                    struck = True
                    strike()
            finished = answer.finished
        return Told(tuple(token_ids), time.monotonic() - began_s, dict((finished and finished.report) or {}))

    def whole(self, but: dict[str, int] | None = None) -> str:
        """Why not everything stands ready; empty when it does. `but`: processes whose pid must have changed."""
        assert self.client is not None
        try:
            worker = self.client.status().worker
            if worker.state != "ready":
                return f"the worker is {worker.state}"
        except OutriggerError as error:
            return str(error)
        pids = self.system.pids()
        late = [name for name, pid in (but or {}).items() if pids.get(name, pid) == pid]
        if late:
            return f"{', '.join(late)} did not start again"
        holds = self.settings.host.kv_host_tokens < self.settings.host.n_ctx
        holds |= self.own_worker and self.settings.worker.pages == "on"  # connected all the same
        if holds and not self.value("bridge", "outrigger_pages_up"):
            return "no worker that holds pages is connected"
        return ""

    def wait_whole(self, timeout_s: float, but: dict[str, int] | None = None) -> None:
        """Raises ServiceError with the reason when not everything stands ready in time."""
        until_s = time.monotonic() + timeout_s
        while why := self.whole(but):
            if time.monotonic() > until_s:
                raise ServiceError(f"after {timeout_s:.0f} s the system is not whole: {why}")
            time.sleep(LOOK_S)

    # --- the worker's end, and what processes hold

    def far_end(self) -> FarEnd | None:
        """The worker's control channel when it takes faults; None when it does not. Close it."""
        bridge, worker = self.settings.bridge, self.settings.worker
        at = (worker.control_port, "127.0.0.1") if self.own_worker else _place(bridge)
        end = None
        with suppress(OSError, ServiceError):
            end = FarEnd(*at)
            end.ask("faults")
            return end
        if end is not None:
            end.close()
        return None

    def pids(self) -> dict[str, int]:
        """Process id by name, of those that can be killed."""
        return self.system.pids()

    def footprints(self) -> dict[str, Footprint]:
        """Of every process, launch included."""
        return footprints({"launch": self.system.pid, **self.pids()})

    def metrics(self, process: str) -> dict[str, float]:
        """Its series; none while it is not there."""
        try:
            return scrape(getattr(self.settings.metrics, f"{process}_port"))
        except OSError:
            return {}

    def value(self, process: str, series: str) -> float:
        """One of them; 0 while it is not there."""
        return self.metrics(process).get(series, 0.0)

    def not_at_rest(self) -> list[str]:
        """Gauges that must be zero when nothing is asked, a journal that is not as its broker says, spare processes."""
        found = []
        for process, names in ZERO_AT_REST.items():
            seen = self.metrics(process)
            found += [f"{name} is {seen[name]:g}" for name in names if seen.get(name, 0.0)]
        broker = self.settings.broker
        known = self.value("broker", "outrigger_journal_bytes")
        found += look_at(Path(broker.journal_dir)).wrong(known, broker.journal_mib * MIB)
        mine = self.pids().values()
        return found + [
            f"a process too many runs: {pid} {command}"
            for pid, command in self.descendants().items()
            if pid not in mine and SUPERVISOR not in command
        ]

    def descendants(self) -> dict[int, str]:
        """Command by process id, of every process that comes from `outrigger run`."""
        found = {}
        for each in psutil.Process(self.system.pid).children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                found[each.pid] = " ".join(each.cmdline())
        return found


def _place(bridge: Any) -> tuple[int, str]:
    return bridge.worker_control_port, bridge.worker_host


def why_not_past(settings: Settings) -> str:
    """Why old pages cannot leave the host with these settings; empty when they can."""
    host = settings.host
    if host.hold == "off":
        return "host.hold is off: all pages stay in the host's memory"
    if host.decode == "fused":
        return "host.decode is fused: only pages can leave the host's memory"
    if settings.worker.pages == "off" and not settings.bridge.worker_host:
        return "worker.pages is off: the worker holds none"
    return ""


def check_drillable(settings: Settings) -> None:
    """Raise SettingError or ServiceError, with the remedy, when these settings cannot be drilled."""
    host = settings.host
    if host.split == "off":
        raise SettingError("host.split is off: without a worker there is nothing to lose; leave it on here")
    if host.split_decode == "on":
        raise SettingError(
            "host.split_decode is on: `outrigger verify --faults` strikes that, a drill does not"
        )
    if settings.bridge.worker_host in ("auto", "usbmux"):
        raise SettingError(
            "bridge.worker_host: a drill wants the worker's address, `outrigger doctor` tells it"
        )
    if settings.bridge.worker_host and running(settings.run_dir):
        raise ServiceError(
            f"a launch in {settings.run_dir} uses the worker, which has one link: `outrigger down` first"
        )

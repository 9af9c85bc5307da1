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

from common.config import Settings
from common.errors import OutriggerError, ServiceError, SettingError
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
ZERO_AT_REST = ("outrigger_requests_running", "outrigger_requests_waiting")


@dataclass(frozen=True)
class Told:
    """An answer, and what its report says."""

    token_ids: tuple[int, ...]
    seconds: float
    report: dict[str, Any]


class Struckable:
    """Use as a context. own_worker: started here, on an emulated link that takes faults."""

    def __init__(self, model: Path, settings: Settings, emulate: str = "loopback") -> None:
        """Raises SettingError when these settings name no worker that could be lost."""
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
        if self.own_worker:
            flags |= {"worker_emulate": emulate, "threads": 1, "worker_threads": 1}
        self.system = RunningSystem(model, like=settings, **flags)
        self.settings = self.system.settings
        self.client: OutriggerClient | None = None

    def __enter__(self) -> Struckable:
        self.system.__enter__()
        self.client = self.system.client()
        return self

    def __exit__(self, *_: object) -> None:
        if self.client:
            self.client.close()
        self.system.__exit__()

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
        return f"{', '.join(late)} did not start again" if late else ""

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

    def not_at_rest(self) -> list[str]:
        """Gauges that must be zero when nothing is asked, and are not."""
        found = scrape(self.settings.metrics.mac_port)
        return [f"{name} is {found[name]:g}" for name in ZERO_AT_REST if found.get(name, 0.0)]


def _place(bridge: Any) -> tuple[int, str]:
    return bridge.worker_control_port, bridge.worker_host


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

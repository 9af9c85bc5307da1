"""Host processes and workers of a split measurement: one host alone, and one host with its bridge and worker per L.

Or one whose old pages a worker holds, with a broker. All of them stay up together and take turns, so that every round
of a measurement meets the same machine: host processes share one core, workers the other. Used by the benches of
services.bench and by services.bench.verify.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from common.config import Settings, load_settings
from common.model.split import write_tail
from common.wire.messages import HostStatus
from services.bench.client import HostClient
from services.bench.processes import Processes, cores, free_port
from services.bench.report import Report

READY_S_MAX = 120.0


@dataclass(frozen=True)
class Seat:
    """A running host one can ask; split_layer 0: alone."""

    name: str
    split_layer: int
    """0: alone; for a host that chooses by itself, the first layer of its worker's file."""
    client: HostClient
    others: tuple[str, ...] = ()
    """Its processes beside the mac process."""


class Rig:
    """Seats over one model. Use as a context."""

    def __init__(self, model: Path, *, n_ctx: int, pinned: bool = True, **host_settings: object) -> None:
        """pinned: host processes on the first core, workers on the second (where the system can pin)."""
        self.model, self.n_ctx = model, n_ctx
        self.processes = Processes()
        self.pinned = pinned and len(cores()) >= 2
        self._host_settings = host_settings
        self._seats: list[Seat] = []
        self._settings_of: dict[str, Settings] = {}

    @property
    def host_core(self) -> int | None:
        return cores()[0] if self.pinned else None

    @property
    def worker_core(self) -> int | None:
        return cores()[1] if self.pinned else None

    def seat_alone(self, **flags: object) -> Seat:
        """Start a host that never splits. flags: settings of this seat alone."""
        return self._seat("alone", 0, self._settings("alone", 0, more=flags))

    def seat_threads(self, n_threads: int) -> Seat:
        """Start a host that never splits, with several threads and no core of its own."""
        name = f"threads{n_threads}"
        settings = self._settings(name, 0, more={"threads": n_threads})
        return self._seat(name, 0, settings, pinned=False)

    def seat_split(self, split_layer: int, name: str = "", *, chooses: bool = False, **flags: object) -> Seat:
        """Start a host that splits at `split_layer`, with a bridge and a worker of its own.

        chooses: the host may move the split from there. flags: settings of this seat alone.
        """
        name = name or f"split{split_layer}"
        tail = self.processes.folder / f"tail{split_layer}.gguf"
        if not tail.exists():
            write_tail(self.model, split_layer, tail)
        settings = self._settings(name, split_layer, tail, flags | ({"split_layer": None} if chooses else {}))
        self.processes.start(f"{name}-worker", "device.worker", settings, self.worker_core)
        self.processes.start(f"{name}-bridge", "services.bridge", settings, self.host_core)
        return self._seat(name, split_layer, settings, others=("bridge", "worker"))

    def seat_held(self, name: str = "held", **flags: object) -> Seat:
        """Start a host whose old pages go to a broker of its own and to a worker that holds pages only.

        flags: settings of this seat alone.
        """
        settings = self._settings(name, 0, more={**self._pages_settings(name), **flags})
        for part, module, core in (
            ("worker", "device.worker", self.worker_core),
            ("bridge", "services.bridge", self.host_core),
            ("broker", "services.broker", self.host_core),
        ):
            self.processes.start(f"{name}-{part}", module, settings, core)
        return self._seat(name, 0, settings, others=("bridge", "worker", "broker"))

    def close(self, seat: Seat) -> None:
        """End a seat's processes."""
        self._seats.remove(seat)
        seat.client.close()
        self.processes.stop(*(f"{seat.name}-{part}" for part in self.pids(seat)))

    def restart_worker(self, seat: Seat) -> None:
        """Start a worker again that was killed, at its old address."""
        settings = self._settings_of[seat.name]
        self.processes.start(f"{seat.name}-worker", "device.worker", settings, self.worker_core)

    def settings(self, seat: Seat) -> Settings:
        """What a seat's processes were started with."""
        return self._settings_of[seat.name]

    def pids(self, seat: Seat) -> dict[str, int]:
        """Process ids of a seat by part: mac, and those of its others."""
        return {part: self.processes.pid(f"{seat.name}-{part}") for part in ("mac", *seat.others)}

    def status(self, seat: Seat) -> HostStatus:
        """The host's status. Raises ServiceError when it does not answer."""
        found: list[HostStatus] = []

        def answers() -> bool:
            status = seat.client.status(timeout_s=5.0)
            found[:] = [status] if status else []
            return bool(found)

        self.processes.wait_until(f"{seat.name} to answer", answers)
        return found[0]

    def wait_ready(self, seat: Seat) -> None:
        """Wait until the host serves and, if it splits, its worker is ready."""

        def ready() -> bool:
            status = seat.client.status()
            if status is None or status.state != "ready":
                return False
            return not seat.split_layer or status.worker.state == "ready"

        self.processes.wait_until(f"{seat.name} to be ready", ready, READY_S_MAX)

    def tell_what_runs(self, report: Report, label: str) -> None:
        """Have the report say which kernels and layouts compute on each side, as the running processes tell."""
        for seat in self._seats:
            status = self.status(seat)
            report.ran(f"{label} {seat.name}, host", status.kernels)
            if seat.split_layer:
                report.ran(f"{label} {seat.name}, worker", status.worker.device)

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exception: object) -> None:
        for seat in self._seats:
            seat.client.close()
        self.processes.__exit__(None, None, None)

    # --- inside

    def _seat(
        self,
        name: str,
        split_layer: int,
        settings: Settings,
        *,
        pinned: bool = True,
        others: tuple[str, ...] = (),
    ) -> Seat:
        self.processes.start(f"{name}-mac", "services.mac", settings, self.host_core if pinned else None)
        self._settings_of[name] = settings
        seat = Seat(name, split_layer, HostClient(settings.run_dir, name="bench"), others)
        self._seats.append(seat)
        return seat

    def _pages_settings(self, name: str) -> dict[str, object]:
        """Of a worker that holds pages only, and of the processes that bring them there."""
        port, control_port = free_port(), free_port()
        return {
            "split": "on",
            "journal_dir": str(self.processes.run_dir(f"{name}-journal")),
            "worker_pages": "only",
            "worker_host": "127.0.0.1",
            "worker_port": port,
            "worker_control_port": control_port,
            "listen_port": port,
            "listen_pages_port": 0,
            "listen_control_port": control_port,
        }

    def _settings(
        self, name: str, split_layer: int, tail: Path | None = None, more: dict[str, object] | None = None
    ) -> Settings:
        """The settings of one seat's processes: one thread each, free ports, a run directory of their own."""
        flags: dict[str, object] = {
            "run_dir": str(self.processes.run_dir(name)),
            "model": str(self.model),
            "n_ctx": self.n_ctx,
            "threads": 1,
            "split": "on" if split_layer else "off",
            "split_layer": split_layer or None,
            "split_guard": "off",
            "worker_threads": 1,
            "worker_ctx": self.n_ctx,
            "mac_metrics_port": 0,
            "bridge_metrics_port": 0,
            "log_format": "json",
            **self._host_settings,
        }
        if tail is not None:
            port, control_port = free_port(), free_port()
            flags |= {
                "tail": str(tail),
                "worker_host": "127.0.0.1",
                "worker_port": port,
                "worker_control_port": control_port,
                "listen_port": port,
                "listen_control_port": control_port,
            }
        return load_settings(None, {}, flags | (more or {}))

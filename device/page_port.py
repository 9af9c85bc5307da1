"""The worker's part for held pages, wired together: a port, a backend with threads of its own, the desk, its service.

Stands beside the tail's parts and shares nothing with them but the machine. Made and asked by device.worker.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from common.config import WorkerSettings
from common.crash_note import Slot
from common.errors import ServiceError
from common.ggml.backend import Backend, choose_device
from common.limits import CHUNK_WINDOW_MAX, MIB
from common.log import get_log
from common.wire.attention_link import AttentionLink
from device.control import Facts
from device.coreml.frozen.builder import Rows
from device.emulator.page_service import EmulatedPageService
from device.emulator.stand_in import StandIn
from device.frozen_groups import FrozenGroups, FrozenShape, open_by_settings
from device.held_group import HeldForm
from device.link_server import LinkServer, listen
from device.page_desk import PageDesk
from device.page_service import PageService
from device.page_store import PageStore
from device.service import Terms

log = get_log()

PORT_AFTER = 2
"""Where nothing is set, pages have the port so many after the residual channel's, as with the ports' defaults."""


class PagePort:
    """Listens once made; `start` serves."""

    def __init__(
        self,
        settings: WorkerSettings,
        machine: Facts,
        stand_in: StandIn | None,
        folder: Path,
        on_change: Callable[[], None],
    ) -> None:
        """folder: for page programs. Raises ServiceError when the port is taken."""
        self._settings, self._machine, self._stand_in = settings, machine, stand_in
        self._folder, self._on_change = folder, on_change
        self._listener = _listen(settings)
        self._server: LinkServer | None = None

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def serving(self) -> bool:
        """Whether a host is attached."""
        return self._server is not None and self._server.serving is not None

    def start(self, terms: Terms, crash_slot: Slot) -> None:
        """Serve. Raises EngineError."""
        self.backend = Backend(choose_device(), self._settings.n_threads)
        store, stand_in = PageStore(self.backend, self._budget_bytes, self._open_frozen), self._stand_in
        self.service = EmulatedPageService(stand_in, store, terms) if stand_in else PageService(store, terms)
        self.desk = PageDesk(self.service, crash_slot=crash_slot)
        self._server = LinkServer(
            self._listener,
            self.desk,
            window=CHUNK_WINDOW_MAX,
            make_link=AttentionLink,
            on_change=self._on_change,
            wrap=stand_in.wrap_pages if stand_in else lambda sock: sock,
        )
        self._server.start()

    def told(self) -> dict[str, Any]:
        """The pages' part of `mem`."""
        if self._server is None:
            return {}
        report = self.service.frozen_report()
        told: dict[str, Any] = {"pa_port": self.address[1]}
        told |= {"pa_held": self.service.n_keys, "pa_calls": self.service.store.n_calls}
        if report is None:
            return told
        ready = report.pages.get("ready", 0)
        frozen = {"frozen": msgspec.to_builtins(report), "pa_ane": f"{report.engine}: {ready} pages ready"}
        return told | frozen

    def stop(self, timeout_s: float) -> None:
        """End clients; free everything if the request at hand ends within timeout_s."""
        if self._server is None:
            self._listener.close()
            return
        self._server.stop()
        if self.desk.stop(timeout_s):
            self.backend.close()

    def _budget_bytes(self) -> int:
        """Half of what is free now, if nothing else was said: the tail's own memory is taken already."""
        if self._settings.hold_mib is not None:
            return self._settings.hold_mib * MIB
        return self._machine.memory()["avail_mb"] // 2 * MIB

    def _open_frozen(self, form: HeldForm, rows: Callable[[int, int, int], Rows]) -> FrozenGroups | None:
        shape = FrozenShape(form.layers, form.n_head_kv, form.head_dim, form.n_group, form.group_tokens)
        return open_by_settings(self._settings, shape, rows, self._folder)


def _listen(settings: WorkerSettings) -> socket.socket:
    """The port that is set; else the one after the residual port, or a free one when that is taken."""
    if settings.pages_port is not None:
        return listen(settings.host, settings.pages_port)
    wanted = settings.port + PORT_AFTER if settings.port else 0
    try:
        return listen(settings.host, wanted if wanted < 1 << 16 else 0)
    except ServiceError as error:
        log.warning("pages get another port", wanted=wanted, reason=str(error))
        return listen(settings.host, 0)

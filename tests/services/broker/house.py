"""A run directory with a real broker process in it; mac and bridge are small peers that speak the real messages."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import LinkDownError
from common.wire import held as h
from common.wire.routes import HOLD, PAGES
from services.bench.processes import free_port
from services.runtime.bus import BlockingAsker, BlockingOwner
from services.runtime.conversation import Received
from services.runtime.endpoints import route_endpoint
from tests.services.broker.pages import FORM, ids_of, image_of

WAIT_S = 20.0
LIMIT = 512
IDS = ids_of(64 * 16)


class House:
    """A run directory with a broker in it, a mac and a bridge."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.folder, self.environ = folder, environ
        (folder / "run").mkdir(mode=0o700)
        self.bridge = BlockingOwner(PAGES, route_endpoint(folder / "run", PAGES))
        self.mac = BlockingAsker(HOLD, route_endpoint(folder / "run", HOLD), name="mac")
        self.said: list[Any] = []
        self.pushed: list[h.PagePlace] = []
        self.epoch = 0
        self.ticket = 100
        self.metrics_port = free_port()
        self.start()

    def start(self) -> None:
        environ = {
            **os.environ,
            "OUTRIGGER_CONFIG": "",
            "OUTRIGGER_RUN_DIR": str(self.folder / "run"),
            "OUTRIGGER_JOURNAL_DIR": str(self.folder / "journal"),
            "OUTRIGGER_KV_HOST_TOKENS": str(LIMIT),
            "OUTRIGGER_BROKER_METRICS_PORT": str(self.metrics_port),
            **self.environ,
        }
        command = [sys.executable, "-m", "services.broker"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def ask(self, message: Any, *arrays: Any) -> None:
        self.mac.send(message, *arrays, wait_s=WAIT_S)

    def hear(self, kind: type, fits: Callable[[Any], bool] = lambda message: True) -> Any:
        """The next message of this kind to mac; the bridge answers meanwhile."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for index, message in enumerate(self.said):
                if isinstance(message, kind) and fits(message):
                    return self.said.pop(index)
            if received := self.mac.recv(0.02):
                self.said.append(received.message)
            self.serve_bridge()
        raise AssertionError(f"no {kind.__name__}; said {self.said}; {(self.folder / 'log').read_text()}")

    def turn_worker(self, up: bool) -> None:
        """The worker comes or goes; the broker is told at once."""
        self.worker_up = up
        said = h.PagesUp(1, "emulator", 1 << 30) if up else h.PagesDown(1, "down", "no cable")
        self.bridge.send(said, to=self.broker_peer)

    worker_up = True
    tokens_max = 1 << 20
    kept_keys = 0
    damages = 0
    """Pushes that find their page damaged."""
    cut: h.CutPages | None = None

    def serve_bridge(self) -> None:
        """As the bridge does, with a worker that takes everything up to tokens_max."""
        while received := self.bridge.recv(0):
            with suppress(LinkDownError):  # said by a broker that was killed
                self.answer(received)

    def answer(self, received: Received) -> None:
        match message := received.message:
            case h.WatchPages():
                self.broker_peer = received.peer
                up, down = h.PagesUp(1, "emulator", 1 << 30), h.PagesDown(1, "down", "no cable")
                self.bridge.send(up if self.worker_up else down, to=received.peer)
            case h.HoldPages():
                self.epoch += 1
                self.sessions = (*getattr(self, "sessions", ()), message.session)
                self.bridge.send(
                    h.PagesGranted(
                        message.ticket,
                        self.epoch,
                        message.conversation,
                        1 << 30,
                        self.tokens_max,
                        self.kept_keys,
                    ),
                    to=received.peer,
                )
            case h.PushPage() if self.damages:
                self.damages -= 1
                failed = h.PushFailed(message.ticket, message.epoch, 1, "damaged", "not what it was")
                self.bridge.send(failed, to=received.peer)
            case h.PushPage():
                self.pushed.append(message.place)
                keys = (message.place.page + 1) * FORM.page_tokens
                said = h.PagePushed(message.ticket, message.epoch, message.place.layer, keys, 0.001)
                self.bridge.send(said, to=received.peer)
            case h.CutPages():
                self.cut = message
                self.bridge.send(h.PagesCut(message.ticket, message.epoch, message.n_keys), to=received.peer)

    def wait_for_cut(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.cut is None and time.monotonic() < deadline:
            self.serve_bridge()
            time.sleep(0.01)

    def open(self, ids: np.ndarray = IDS) -> h.ConversationOpened:
        self.ask(h.OpenConversation(1, FORM, len(ids)), ids)
        return self.hear(h.ConversationOpened)

    def keep(
        self, conversation: int, pages: range, ids: np.ndarray = IDS, seed: int = 0
    ) -> list[h.PagePlace]:
        places = []
        for page in pages:
            for layer in FORM.layers:
                self.ticket += 1
                keys, values = image_of(layer, page, seed)
                said = h.KeepPage(
                    self.ticket, conversation, layer, page, FORM.page_tokens, FORM.key_bytes, FORM.value_bytes
                )
                self.ask(said, keys, values, ids[page * 64 : (page + 1) * 64].copy())
                places.append(self.hear(h.PageKept, lambda kept: kept.ticket == self.ticket).place)
        return places

    def close(self) -> None:
        self.process.terminate()
        assert self.process.wait(timeout=WAIT_S) == 0, (self.folder / "log").read_text()
        self.mac.close()
        self.bridge.close()

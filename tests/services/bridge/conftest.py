"""A bridge in this process between a real worker process and the mac's two ends of the bus, driven by blocking calls.

The bridge's event loop runs on a thread; its pump on its own, as in the product. The worker is always another process,
so that it can be killed and frozen.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from common.config import BridgeSettings
from common.metrics import Metrics
from common.wire import messages as m
from common.wire.routes import LINK, RESIDUAL
from services.bridge.bridge import Bridge
from services.runtime.bus import BlockingAsker
from services.runtime.endpoints import route_endpoint
from tests.device.conftest import cases  # noqa: F401  (the tiny models)

WAIT_S = 30.0


class BridgeThread:
    """A Bridge with its own event loop on a thread."""

    def __init__(self, run_dir: Path, worker: tuple[str, int], control_port: int = 1, **settings):
        self.metrics = Metrics("bridge")
        self._settings = BridgeSettings(
            worker_host=worker[0], worker_port=worker[1], worker_control_port=control_port, **settings
        )
        self._run_dir = run_dir
        self.said: list[str] = []
        """What people were told, in order."""
        self._up, self.failure = threading.Event(), None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._main()), name="bridge loop")
        self._thread.start()
        assert self._up.wait(WAIT_S)

    async def _main(self):
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.bridge = Bridge(
            self._settings, self.metrics, lambda route: route_endpoint(self._run_dir, route), say=self._say
        )
        tasks = [asyncio.create_task(part) for part in self.bridge.parts().values()]
        self._up.set()
        stop = asyncio.create_task(self._stop.wait())
        done, _ = await asyncio.wait([*tasks, stop], return_when=asyncio.FIRST_COMPLETED)
        self.failure = next((task.exception() for task in done if task is not stop), None)
        await self.bridge.close()
        for task in tasks:
            task.cancel()

    async def _say(self, text: str) -> None:
        self.said.append(text)

    def value(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(f"outrigger_{name}", labels)

    def close(self):
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        assert not self._thread.is_alive()
        assert self.failure is None


class MacEnd:
    """What the mac process does on the bus: attach, ask, hear."""

    def __init__(self, run_dir: Path, name: str = "mac"):
        self.link = BlockingAsker(LINK, route_endpoint(run_dir, LINK), name=name)
        self.residual = BlockingAsker(RESIDUAL, route_endpoint(run_dir, RESIDUAL), name=name)
        self.epoch = 0
        self._tickets = itertools.count(1)

    def attach(self, hello: m.LinkHello) -> None:
        self.link.send(m.AttachWorker(hello), wait_s=WAIT_S)

    def told(self, kind, timeout_s: float = WAIT_S):
        """The next message of this kind on route link."""
        until = time.monotonic() + timeout_s
        while (received := self.link.recv(max(0.0, until - time.monotonic()))) is not None:
            if isinstance(received.message, kind):
                if isinstance(received.message, m.LinkUp):
                    self.epoch = received.message.link_epoch
                return received.message
        raise AssertionError(f"no {kind} came in {timeout_s} s")

    def send(self, kind, *values, arrays=(), epoch: int | None = None) -> int:
        """Ask without waiting; returns the ticket."""
        ticket = next(self._tickets)
        self.residual.send(
            kind(self.epoch if epoch is None else epoch, ticket, *values), *arrays, wait_s=WAIT_S
        )
        return ticket

    def heard(self, timeout_s: float = WAIT_S):
        """The next answer, (message, frames)."""
        received = self.residual.recv(timeout_s)
        assert received is not None, f"no answer came in {timeout_s} s"
        return received.message, received.frames

    def run(self, residual: np.ndarray, position: int, want: int = 0) -> int:
        return self.send(m.RunChunk, position, *residual.shape, want, arrays=[residual])

    def close(self):
        self.link.close()
        self.residual.close()


def link_hello(case, **changes) -> m.LinkHello:
    """The mac's half of the greeting for a case's tail."""
    spec = case.spec
    fields = dict(
        split_layer=case.first, n_layer_full=spec.n_layer_full, n_embd=spec.n_embd, n_vocab=spec.n_vocab,
        n_ctx=1024, kv_type=1, fingerprint_text=spec.fingerprint_text(case.first), window=2,
    )  # fmt: skip
    return m.LinkHello(**(fields | changes))


@pytest.fixture
def run_dir():
    with tempfile.TemporaryDirectory(prefix="outrigger-test-", ignore_cleanup_errors=True) as folder:
        yield Path(folder)


@pytest.fixture
def bridged(run_dir):
    """bridged(worker, ...) -> (BridgeThread, MacEnd); all are closed at the end."""
    opened = []

    def start(worker, control_port=1, **settings):
        bridge = BridgeThread(run_dir, worker, control_port, **settings)
        opened.append(bridge)
        mac = MacEnd(run_dir)
        opened.append(mac)
        return bridge, mac

    yield start
    for each in reversed(opened):
        each.close()

"""Aim: clients that leave, at whatever moment, leave no gauge up: what runs, waits, is kept, held or under way
afterwards is what it was before they came.
Method: `outrigger run` over a small hybrid with a limit of 1,024 tokens. One conversation past it is answered; then
clients leave while they wait, are read (below and past the limit) or are answered; then that conversation is asked
again. Every gauge of every process must be back. What may differ is named here, with the reason."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import urllib.request
from collections.abc import Iterator

import pytest

from common.model.synthetic import ensure_preset
from services.bench.processes import free_port
from tests.journey.system import WAIT_S, System, running_system, until

pytestmark = pytest.mark.model

MAY_DIFFER = {
    "journal_bytes": "the journal keeps what it has until its cap",
    "worker_available_bytes": "other programs take memory, too",
    "worker_epoch": "counts lives",
    "worker_pace_seconds": "a measurement",
}
SHORT, PAST = "The sea was calm and the sail was full. ", "A gull sat on the mast and looked at the sea. "
LEAVE_AFTER = (0, 0, 1, 1, 2, 4)
"""Reads of the stream after which a client of a wave leaves: at once, after the first words of the answer, later."""


class Clients:
    """Of a running system whose processes serve their metrics at these ports."""

    def __init__(self, system: System, ports: dict[str, int]) -> None:
        self.system, self.ports = system, ports

    def chat(self, text: str) -> str:
        """A whole answer."""
        body = json.dumps(_body(text, stream=False)).encode()
        request = urllib.request.Request(f"{self.system.url}/chat/completions", body, HEADERS)
        with urllib.request.urlopen(request, timeout=90) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]

    def leave(self, text: str, n_reads: int) -> None:
        """Ask, take so many pieces, and be gone."""
        body = json.dumps(_body(text, stream=True)).encode()
        head = "POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", self.system.port), timeout=60) as client:
            client.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
            for _ in range(n_reads):
                client.recv(1024)

    def wave(self, text: str) -> None:
        """Several clients at once, so that most of them wait; each leaves at a moment of its own."""
        threads = [
            threading.Thread(target=self.leave, args=(f"{number}. {text}", n_reads))
            for number, n_reads in enumerate(LEAVE_AFTER)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def page(self, process: str) -> str:
        with urllib.request.urlopen(
            f"http://127.0.0.1:{self.ports[process]}/metrics", timeout=WAIT_S
        ) as page:
            return page.read().decode()

    def gauges(self) -> dict[str, float]:
        """Every gauge of ours that must come back, with its labels and its process."""
        found = {}
        for process in self.ports:
            lines = self.page(process).splitlines()
            names = {
                line.split()[2] for line in lines if line.startswith("# TYPE") and line.endswith("gauge")
            }
            for line in lines:
                series, _, value = line.rpartition(" ")
                name = series.partition("{")[0]
                ours = name.startswith("outrigger_") and name in names and not name.endswith("_created")
                if ours and name.removeprefix("outrigger_") not in MAY_DIFFER:
                    found[f"{process} {series}"] = float(value)
        return found

    def cancelled(self) -> float:
        """Requests that ended because their clients left."""
        series = 'outrigger_requests_total{outcome="cancelled"} '
        return next(
            float(line.removeprefix(series)) for line in self.page("gateway").splitlines() if series in line
        )


HEADERS = {"Content-Type": "application/json"}


def _body(text: str, *, stream: bool) -> dict[str, object]:
    messages = [{"role": "user", "content": text}]
    return {"messages": messages, "max_tokens": 48, "temperature": 0, "stream": stream}


@pytest.fixture
def clients(smollm2) -> Iterator[Clients]:
    """smollm2: the tiny hybrid takes its tokenizer from the embedded model."""
    ports = {process: free_port() for process in ("gateway", "mac", "broker", "bridge")}
    environ = {f"OUTRIGGER_{process.upper()}_METRICS_PORT": str(port) for process, port in ports.items()}
    environ |= {
        "OUTRIGGER_KV_HOST_TOKENS": "1024",
        "OUTRIGGER_PAGE_TOKENS": "64",
        "OUTRIGGER_GROUP_PAGES": "2",
    }
    model = str(ensure_preset("tiny"))
    flags = ("--model", model, "--n-ctx", "4096", "--threads", "1", "--worker-threads", "1")
    with running_system(*flags, "--split-layer", "4", **environ) as system:
        yield Clients(system, ports)


def test_who_leaves_leaves_nothing_behind(clients):
    placed = 'broker outrigger_held_pages{where="worker"}'
    kept = PAST * 180
    right = clients.chat(kept)
    until(lambda: clients.gauges()[placed] > 0)
    before: dict[str, float] = {}

    def settled() -> bool:
        last, before_now = dict(before), clients.gauges()
        before.clear()
        before.update(before_now)
        return last == before_now

    until(settled)
    assert before["mac outrigger_requests_running"] == before["mac outrigger_requests_waiting"] == 0
    for text in (SHORT * 8, SHORT * 90, PAST * 150):
        clients.wave(text)
    until(lambda: clients.cancelled() >= 2 * len(LEAVE_AFTER))
    assert clients.chat(kept) == right
    differs: dict[str, tuple[float | None, float]] = {}

    def back() -> bool:
        differs.clear()
        differs.update({k: (before.get(k), v) for k, v in clients.gauges().items() if before.get(k) != v})
        return not differs

    with contextlib.suppress(AssertionError):
        until(back)
    assert not differs, f"before and after: {differs}"
    assert len(before) > 20, "gauges were compared"

"""A small running system past its limit, with everything on, and the Prometheus that scrapes it.

The model is a tiny hybrid; the limit is 1,024 tokens, so that a prompt of 2,000 fills journal and worker within a
second, and old groups become page programs that the reference interpreter runs. Disk and worker fail when told to.
Used by the tests beside it; nothing of the product is imported but what names files and finds models.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from common.model.synthetic import ensure_preset
from tests.journey.system import System, running_system, until
from tests.system.prometheus import Prometheus, free_port, running_prometheus

SLOW_DISK = """\
import os, time
_fsync = os.fsync

def fsync(fd):
    while os.path.exists({flag!r}):
        time.sleep(0.05)
    _fsync(fd)

os.fsync = fsync
"""
"""Read by every Python as it starts: the system's call that forces a file to the disk waits while the flag is there."""
SETTINGS = {
    "OUTRIGGER_WORKER_EMULATE": "loopback",
    "OUTRIGGER_FROZEN": "interpreter",
    "OUTRIGGER_KV_HOST_TOKENS": "1024",
    "OUTRIGGER_PAGE_TOKENS": "256",
    "OUTRIGGER_GROUP_PAGES": "2",
    "OUTRIGGER_SHADOW_EVERY": "10",
    "OUTRIGGER_FSYNC": "page",
    "OUTRIGGER_SHORT_CTX": "0",  # so that a second request waits
    "OUTRIGGER_ANSWER_S_MIN": "60",  # so that a frozen worker is waited for
    "OUTRIGGER_WORKER_REST_S": "1",
}


class Watched:
    """A running system and the Prometheus that scrapes it."""

    def __init__(self, system: System, prometheus: Prometheus, control_port: int, folder: Path) -> None:
        self.system, self.prometheus = system, prometheus
        self.journal, self._slow_disk = folder / "journal", folder / "slow"
        self._control_port = control_port

    def chat(self, subject: str, n_sentences: int = 200, then: str = "", max_tokens: int = 24) -> dict:
        """Ask about ten tokens a sentence; 100 stay below the limit, 200 are twice as long as it."""
        text = f"The {subject} was wide and the boat was small. " * n_sentences + then
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0}
        request = urllib.request.Request(
            f"{self.system.url}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json", "X-Outrigger-Report": "1"},
        )
        with urllib.request.urlopen(request, timeout=180) as answer:
            return json.load(answer)

    @contextmanager
    def chatting(self, *subjects: str, n_sentences: int = 200) -> Iterator[None]:
        """Requests that run meanwhile, and have ended well after it."""
        answers: list[dict] = []
        threads = [
            threading.Thread(target=lambda each=each: answers.append(self.chat(each, n_sentences)))
            for each in subjects
        ]
        for thread in threads:
            thread.start()
        yield
        for thread in threads:
            thread.join(180)
        assert len(answers) == len(subjects), "a request failed"

    def fault(self, script: str) -> None:
        """Arm a fault of the emulated worker."""
        with socket.create_connection(("127.0.0.1", self._control_port), timeout=20) as control:
            control.sendall(f"fault {script}\n".encode())
            assert b'"ok"' in control.recv(4096)

    @contextmanager
    def slow_disk(self) -> Iterator[None]:
        """Inside, no file is forced to the disk."""
        self._slow_disk.touch()
        try:
            yield
        finally:
            self._slow_disk.unlink()

    @contextmanager
    def stopped(self, process: str) -> Iterator[None]:
        """Inside, a process of the system does nothing."""
        pid = self.system.pid_of(process)
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.kill(pid, signal.SIGCONT)

    def kill(self, process: str) -> None:
        """It is started again by itself."""
        pid = self.system.pid_of(process)
        os.kill(pid, signal.SIGKILL)
        until(lambda: self._is_another(process, pid))

    def _is_another(self, process: str, pid: int) -> bool:
        try:
            return self.system.pid_of(process) != pid
        except LookupError:
            return False

    def value(self, expression: str) -> float:
        """Sum of what an expression gives now."""
        return sum(self.prometheus.values(expression))

    def most(self, expression: str) -> float:
        """The largest value of the last minutes; 0 where there was none, or nothing but NaN."""
        values = self.prometheus.values(f"max_over_time(({expression})[10m:1s])")
        return max((value for value in values if value == value), default=0.0)

    def wait_fires(self, alert: str) -> None:
        """Until an alert fires by its own expression."""
        until(lambda: alert in self.prometheus.firing(), 60.0)

    def wait_whole(self) -> None:
        """Until the worker is there again, for reads and for pages."""
        until(lambda: self.value("outrigger_worker_up") == 1 and self.value("outrigger_pages_up") == 1, 60.0)
        until(lambda: self.value('outrigger_worker_state{state="ready"}') == 1, 60.0)


@contextmanager
def watching(checkout: Path, folder: Path) -> Iterator[Watched]:
    """The system and its Prometheus."""
    ports = {process: free_port() for process in ("gateway", "mac", "broker", "bridge")}
    control_port = free_port()
    (folder / "sitecustomize.py").write_text(SLOW_DISK.format(flag=str(folder / "slow")))
    environ = {f"OUTRIGGER_{process.upper()}_METRICS_PORT": str(port) for process, port in ports.items()}
    environ |= SETTINGS | {
        "OUTRIGGER_LISTEN_CONTROL_PORT": str(control_port),
        "OUTRIGGER_JOURNAL_DIR": str(folder / "journal"),
        "PYTHONPATH": os.pathsep.join(
            [str(folder), *filter(None, [os.environ.get("PYTHONPATH"), str(checkout)])]
        ),
    }
    flags = ("--model", str(ensure_preset("tiny")), "--n-ctx", "4096", "--split-layer", "4", "--threads", "1")
    with (
        running_system(*flags, **environ) as system,
        running_prometheus(checkout, folder, ports) as prometheus,
    ):
        watched = Watched(system, prometheus, control_port, folder)
        watched.wait_whole()
        yield watched


def use(watched: Watched) -> None:
    """A short load that uses everything once: short and long reads, held pages, page programs, going back."""
    watched.chat("gull", n_sentences=2)
    for subject in ("river", "harbour"):
        watched.chat(subject)
        until(lambda: watched.value('outrigger_held_pages{where="worker"}') > 0)
        time.sleep(2.5)  # two scrapes, so that there is a rate
    until(lambda: watched.value('outrigger_frozen_pages{state="ready"}') > 0)
    watched.chat("harbour", then="Was it?")
    watched.chat("harbour", n_sentences=70, then="No. " * 400)
    until(lambda: watched.value("outrigger:frozen_keys:rate5m") > 0)
    until(lambda: watched.value("outrigger:prefill_tokens_per_second:rate5m{side='worker'}") > 0)
    until(lambda: bool(watched.prometheus.values("outrigger:stage_seconds:p95_5m")))

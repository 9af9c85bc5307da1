"""A real Prometheus for the tests: started on a free port with monitoring/'s own files, asked over its HTTP API."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.journey.system import until

MISSING = (
    "prometheus and promtool are missing: apt-get install prometheus (on a Mac: brew install prometheus)"
)
BUDGET_S, QUEUE_S = 5, 4
SHORTER = {
    r"_interval: 5s": "_interval: 1s",
    r"\bfor: \w+": "for: 0s",
    r"\[3m\]": f"[{QUEUE_S}s]",
    r"vector\(30\)": f"vector({BUDGET_S})",
}
PORTS = {"gateway": "9570", "mac": "9571", "broker": "9572", "bridge": "9573"}


def free_port() -> int:
    """A port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def need_prometheus() -> None:
    """Not to find it is a failure, not a skip."""
    if not shutil.which("prometheus") or not shutil.which("promtool"):
        pytest.fail(MISSING, pytrace=False)


class Prometheus:
    """Its HTTP API."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"

    def get(self, path: str, **query: str) -> dict:
        """The `data` of an answer."""
        with urllib.request.urlopen(
            f"{self.url}{path}?{urllib.parse.urlencode(query)}", timeout=20
        ) as answer:
            return json.load(answer)["data"]

    def values(self, expression: str) -> list[float]:
        """The values of an instant query."""
        found = self.get("/api/v1/query", query=expression)["result"]
        return [float(each["value"][1]) for each in found]

    def firing(self) -> set[str]:
        """Names of the alerts that fire."""
        alerts = self.get("/api/v1/alerts")["alerts"]
        return {each["labels"]["alertname"] for each in alerts if each["state"] == "firing"}

    def is_up(self) -> bool:
        """Whether it answers."""
        try:
            return self.values("vector(1)") == [1.0]
        except OSError:
            return False


@contextmanager
def running_prometheus(checkout: Path, folder: Path, ports: dict[str, int]) -> Iterator[Prometheus]:
    """Prometheus with our files: our processes' ports of this run, a scrape each second, alerts without `for`,
    QUEUE_S in place of the three minutes in which nothing moves, and a budget of BUDGET_S for first tokens."""
    need_prometheus()
    for name in ("prometheus.yml", "rules.yml", "alerts.yml"):
        text = (checkout / "monitoring" / name).read_text()
        for process, port in ports.items():
            text = text.replace(f"127.0.0.1:{PORTS[process]}", f"127.0.0.1:{port}")
        for there, here in SHORTER.items():
            text = re.sub(there, here, text)
        (folder / name).write_text(text)
    port = free_port()
    command = [
        "prometheus",
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address=127.0.0.1:{port}",
        "--log.level=warn",
    ]
    with (folder / "log").open("w") as log, subprocess.Popen(command, stderr=log, stdout=log) as process:
        try:
            prometheus = Prometheus(port)
            until(prometheus.is_up)
            yield prometheus
        finally:
            process.terminate()

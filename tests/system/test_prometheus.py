"""Aim: everything that alerts and dashboards ask for is there, in a real Prometheus that scrapes a running system.

Method: `outrigger run` with an emulated worker, a short load through its API, Prometheus with the files of monitoring/.
Comparisons of alerts are asked with `bool`, so that they answer when all is well, too. Two faults are made to happen:
their alerts must fire. The other alerts fire in monitoring/rules_test.yml, which promtool runs here.
"""

from __future__ import annotations

import json
import math
import re
import socket
import subprocess
import time
import urllib.request

import pytest

from monitoring.panels import DASHBOARDS
from tests.journey.system import running_system, until
from tests.system.prometheus import free_port, need_prometheus, running_prometheus

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

NEEDS_A_PART = {"JournalLagging": "the broker's journal, which runs only where pages are held"}


def expressions(checkout) -> dict[str, str]:
    """Alert -> its expression, with comparisons that answer 0 or 1."""
    text = (checkout / "monitoring" / "alerts.yml").read_text()
    found = re.findall(r"alert: (\w+)\n\s+expr: '?(.*?)'?\n", text)
    return {name: re.sub(r" (>=|>|==) ", r" \1 bool ", expression) for name, expression in found}


def promtool(checkout, *arguments: str) -> str:
    need_prometheus()
    done = subprocess.run(
        ["promtool", *arguments], cwd=checkout / "monitoring", capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_configuration_and_rules_are_valid(checkout):
    assert "SUCCESS" in promtool(checkout, "check", "config", "prometheus.yml")
    assert "SUCCESS" in promtool(checkout, "check", "rules", "rules.yml", "alerts.yml")


def test_rules_compute_and_alerts_fire_as_they_should(checkout):
    promtool(checkout, "test", "rules", "rules_test.yml")


class Watched:
    """A running system and the Prometheus that scrapes it."""

    def __init__(self, system, prometheus, control_port: int) -> None:
        self.system, self.prometheus, self.control_port = system, prometheus, control_port

    def chat(self, text: str, timeout_s: float = 120.0) -> dict:
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 8, "temperature": 0}
        request = urllib.request.Request(
            f"{self.system.url}/chat/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:
            return json.load(answer)

    def fault(self, script: str) -> None:
        """Arm a fault of the emulated worker."""
        with socket.create_connection(("127.0.0.1", self.control_port), timeout=20) as control:
            control.sendall(f"fault {script}\n".encode())
            assert b'"ok"' in control.recv(4096)

    def value(self, expression: str) -> float:
        return sum(self.prometheus.values(expression))


@pytest.fixture(scope="module")
def watched(checkout, smollm2, tmp_path_factory):
    ports = {process: free_port() for process in ("gateway", "mac", "broker", "bridge")}
    control_port = free_port()
    environ = {f"OUTRIGGER_{process.upper()}_METRICS_PORT": str(port) for process, port in ports.items()}
    environ |= {"OUTRIGGER_LISTEN_CONTROL_PORT": str(control_port), "OUTRIGGER_WORKER_EMULATE": "loopback"}
    flags = ("--model", str(smollm2), "--n-ctx", "2048", "--split-layer", "18")
    folder = tmp_path_factory.mktemp("prometheus")
    with (
        running_system(*flags, **environ) as system,
        running_prometheus(checkout, folder, ports) as prometheus,
    ):
        watched = Watched(system, prometheus, control_port)
        until(lambda: watched.value("outrigger_worker_up") == 1)
        for subject in ("river", "harbour"):
            watched.chat(f"The {subject} was wide and the boat was small. " * 100)
            time.sleep(2.5)  # two scrapes, so that there is a rate
        until(lambda: watched.value("outrigger_prefill_tokens_total{side='worker'}") > 0)
        until(lambda: watched.value("outrigger:prefill_tokens_per_second:rate5m{side='worker'}") > 0)
        until(lambda: bool(prometheus.values("outrigger:stage_seconds:p95_5m")))
        yield watched


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)
def test_every_panel_has_data(watched, board):
    empty, not_numbers = [], []
    for panel in board.panels:
        for expression, _legend in panel.queries:
            values = watched.prometheus.values(expression)
            if not values:
                empty.append(expression)
            elif all(math.isnan(value) for value in values) != bool(panel.quiet):
                not_numbers.append(expression)
    assert empty == [] and not_numbers == []


def test_every_alert_has_data_and_none_fires(watched, checkout):
    asked = expressions(checkout)
    assert len(asked) == 8
    without = {name for name, expression in asked.items() if not watched.prometheus.values(expression)}
    assert without <= set(NEEDS_A_PART)
    assert watched.prometheus.firing() - {"WorkerHurts", "TimeToFirstTokenOverBudget"} == set()


def test_a_damaged_frame_and_a_lost_worker_are_told(watched):
    watched.fault("flip answering chunk 1")
    watched.chat("The mast was tall and the rope was long. " * 100)
    until(lambda: "ChecksumMismatch" in watched.prometheus.firing())
    until(lambda: watched.value("outrigger_worker_up") == 1)
    watched.fault("restart 12 now")
    until(lambda: "WorkerLost" in watched.prometheus.firing())
    until(lambda: "WorkerLost" not in watched.prometheus.firing(), 60.0)

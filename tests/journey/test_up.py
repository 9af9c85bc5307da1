"""Aim: the system lives in the background: up says when it serves, status how each process is, a crash is told with the
request that ran, down lets a running answer end, and nothing is left behind.

Method: the commands as a person types them, the embedded model with a worker, real requests, a real SIGSEGV.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.journey.system import FREE_PORTS, WAIT_S, until

pytestmark = pytest.mark.model


class House:
    """`outrigger` commands on one private run directory."""

    def __init__(self, folder: Path) -> None:
        self.run_dir = folder / "run"
        settings = dict.fromkeys(FREE_PORTS, "0") | {"OUTRIGGER_ZMQ": "off", "OUTRIGGER_DRAIN_S": "60"}
        self.environ = (
            os.environ | settings | {"OUTRIGGER_RUN_DIR": str(self.run_dir), "OUTRIGGER_CONFIG": ""}
        )

    def __call__(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "services.cli.main", *arguments],
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=90,
        )

    def processes(self) -> dict[str, dict]:
        """What status says of each process, by name."""
        status = json.loads(self("status", "--json").stdout)
        return {each["process"]: each for each in status.get("processes", ())}

    def pids(self) -> list[int]:
        """All that runs with this run directory in its environment, this process aside."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if str(self.run_dir).encode() in (process / "environ").read_bytes():
                    found.append(int(process.name))
            except OSError:
                continue
        return found


@pytest.fixture
def house():
    with tempfile.TemporaryDirectory(prefix="outrigger-test-", ignore_cleanup_errors=True) as folder:
        made = House(Path(folder))
        yield made
        print(made("down", "--now").stdout)
        for log in sorted(made.run_dir.glob("*.log")):
            print(f"--- {log.name}\n{log.read_text()[-3000:]}")
        assert made.pids() == []


def ask(url: str, model: str, text: str, max_tokens: int) -> str:
    """The text of a streamed answer."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "max_tokens": max_tokens,
        "stream": True,
        "logit_bias": {"2": -100},
    }
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=WAIT_S * 2) as answer:
        return answer.read().decode()


def healthy(url: str) -> bool:
    """Whether the API says that a token can be computed."""
    try:
        with urllib.request.urlopen(f"{url.removesuffix('/v1')}/health", timeout=WAIT_S) as answer:
            return json.load(answer)["status"] == "ok"
    except urllib.error.URLError:
        return False


def in_background(work) -> tuple[threading.Thread, list]:
    """Run `work` on a thread; its result, or its error, is put into the list."""
    got: list = []

    def run() -> None:
        try:
            got.append(work())
        except (OSError, urllib.error.URLError) as error:
            got.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, got


def test_up_status_a_crash_logs_and_down(house, smollm2):
    up = house("up", "--model", str(smollm2), "--n-ctx", "2048")
    assert up.returncode == 0, up.stdout + up.stderr
    url = re.search(r"ready after [\d.]+ s: (\S+)", up.stdout)[1]
    assert "`outrigger down` stops everything." in up.stdout
    again = house("up", "--model", str(smollm2))
    assert (again.returncode, "it runs already" in again.stderr) == (3, True)

    told = house("status")
    assert told.returncode == 0, told.stdout
    assert f"serving: {smollm2.stem} at {url}" in told.stdout
    before = house.processes()
    assert set(before) == {"gateway", "mac", "broker", "bridge", "worker"}

    thread, got = in_background(lambda: ask(url, smollm2.stem, "Count boats. " * 400, 4))
    notes = f"mac.{before['mac']['pid']}.doing"
    until(lambda: b"reading chatcmpl-" in (house.run_dir / notes).read_bytes() or bool(got))
    assert not got, got
    os.kill(before["mac"]["pid"], signal.SIGSEGV)
    thread.join()
    assert "lost while it worked on this request" in str(got[0]), got
    until(lambda: house.processes()["mac"]["restarts"] == 1)
    until(lambda: house("status").returncode == 0)
    until(lambda: healthy(url))
    mac = house.processes()["mac"]
    assert re.search(
        r"crashed with SIGSEGV in \w+ \(.*, while reading chatcmpl-\w+, \d+ of \d+ tokens done",
        mac["last_error"],
    )
    assert mac["last_error"][:60] in house("status").stdout
    until(lambda: "mac was started again" in house("logs", "launch").stdout)

    thread, got = in_background(lambda: ask(url, smollm2.stem, "Tell a long story of a boat.", 100))
    notes_now = house.run_dir / f"mac.{house.processes()['mac']['pid']}.doing"
    until(lambda: b"chatcmpl-" in notes_now.read_bytes() or bool(got))
    assert not got, got
    down = house("down")
    thread.join()
    assert down.returncode == 0, down.stdout
    assert got[0].rstrip().endswith("data: [DONE]"), got
    assert '"finish_reason":"length"' in got[0].replace(" ", "")
    assert house("status").returncode == 3

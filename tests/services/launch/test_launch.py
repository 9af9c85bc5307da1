"""Aim: a launch starts all, says when it is ready, survives a crash of one, and ends with nothing left running.

Method: the real launch, supervisor and process skeleton, with tiny services of this file in place of ours; the launch
runs as a process of its own and is signalled, killed and started twice.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 30.0

SERVICE = """
import asyncio, sys
from common.errors import ModelError
from services.runtime.service import run_service

async def body(life):
    print("pid", life.process, __import__("os").getpid(), flush=True)
    {body}
    await life.ready({{"http": "http://127.0.0.1:1"}})
    await life.stopping.wait()

raise SystemExit(run_service("{name}", body, metrics_port=0))
"""
WORKER = """
import os, time
print("pid worker", os.getpid(), flush=True)
print("worker ready: layers 1-2", flush=True)
time.sleep(600)
"""
LAUNCHER = """
import sys
from pathlib import Path
from common.config import load_settings
from common.errors import OutriggerError
from services.launch import launch
from services.launch.lock import RunLock
from services.launch.programs import Program
from services.runtime.run_dir import open_run_dir

launch.SAY_AFTER_S, launch.WATCH_S = 0.5, 0.2
folder = Path(sys.argv[1])
settings = load_settings()
programs = tuple(
    Program(path.stem, (sys.executable, str(path)), on_bus=path.stem != "worker")
    for path in sorted((folder / "programs").glob("*.py"))
)
try:
    lock = RunLock(open_run_dir(settings.run_dir))
    code = launch.run_programs(
        settings, programs, lock, lambda text: print(text, flush=True),
        lambda roster, seconds: f"ready {sorted(roster.listens)}",
    )
    lock.release()
except OutriggerError as error:
    print(error, flush=True)
    code = 3
raise SystemExit(code)
"""


class House:
    """A folder of programs and the launches started on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.launches: list[subprocess.Popen] = []
        (folder / "programs").mkdir()
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OUTRIGGER_CONFIG": "",
            "OUTRIGGER_RUN_DIR": str(folder / "run"),
        }

    def add(self, name: str, body: str = "pass") -> None:
        (self.folder / "programs" / f"{name}.py").write_text(SERVICE.format(name=name, body=body))

    def add_worker(self) -> None:
        (self.folder / "programs" / "worker.py").write_text(WORKER)

    def launch(self) -> subprocess.Popen:
        with (self.folder / f"out{len(self.launches)}").open("wb") as out:
            command = [sys.executable, "-c", LAUNCHER, str(self.folder)]
            self.launches.append(subprocess.Popen(command, env=self.environ, stdout=out, stderr=out))
        return self.launches[-1]

    def text(self, number: int = -1) -> str:
        return (self.folder / f"out{range(len(self.launches))[number]}").read_text()

    def wait_for(self, phrase: str) -> None:
        wait_until(lambda: phrase in self.text(), self.text)

    def pids(self, name: str) -> list[int]:
        log = self.folder / "run" / f"{name}.log"
        return [int(pid) for pid in re.findall(rf"pid {name} (\d+)", log.read_text())]

    def all_pids(self) -> list[int]:
        return [pid for log in (self.folder / "run").glob("*.log") for pid in self.pids(log.stem)]

    def close(self) -> None:
        for process in self.launches:
            process.kill()
            process.wait()
        wait_until(lambda: not any(map(lives, self.all_pids())), lambda: f"left running: {self.all_pids()}")


def wait_until(condition, told) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.02)


def lives(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


@pytest.fixture
def house():
    with tempfile.TemporaryDirectory(prefix="outrigger-test-") as folder:
        made = House(Path(folder))
        yield made
        made.close()


def test_all_start_and_a_ctrl_c_leaves_nothing_behind(house):
    house.add("gateway")
    house.add("mac")
    house.add_worker()
    launch = house.launch()
    house.wait_for("ready ['gateway', 'mac']")
    pids = house.all_pids()
    assert len(pids) == 3
    assert all(map(lives, pids))
    wait_until(lambda: "process serving" in (house.folder / "run" / "mac.log").read_text(), house.text)
    launch.send_signal(signal.SIGINT)
    assert launch.wait(WAIT_S) == 0
    assert not any(map(lives, pids))
    assert not (house.folder / "run" / "launch.json").exists()
    assert house.text().splitlines()[-1] == "stopping ..."


def test_a_process_that_does_not_start_ends_the_launch_with_its_last_line(house):
    house.add("gateway")
    house.add("mac", "raise ModelError('a.gguf: found x, supported y')")
    launch = house.launch()
    assert launch.wait(WAIT_S) == 3
    assert "mac did not start: a.gguf: found x, supported y" in house.text()
    assert "end of " in house.text()
    assert "ready [" not in house.text()


def test_a_crash_is_told_and_the_process_started_again(house):
    house.add("gateway")
    house.add("mac")
    launch = house.launch()
    house.wait_for("ready [")
    (first,) = house.pids("mac")
    os.kill(first, signal.SIGKILL)
    house.wait_for("mac was started again")
    wait_until(lambda: len(house.pids("mac")) == 2, house.text)
    wait_until(
        lambda: (house.folder / "run" / "mac.log").read_text().count("process serving") == 2,
        (house.folder / "run" / "mac.log").read_text,
    )
    launch.terminate()
    assert launch.wait(WAIT_S) == 0


def test_a_killed_launch_takes_everything_with_it(house):
    house.add("mac")
    launch = house.launch()
    house.wait_for("ready [")
    pids = house.pids("mac")
    launch.kill()
    launch.wait()
    wait_until(lambda: not any(map(lives, pids)), lambda: "orphans stayed")
    # The run directory of a killed launch is no obstacle.
    again = house.launch()
    house.wait_for("ready [")
    again.terminate()
    assert again.wait(WAIT_S) == 0


def test_a_second_launch_says_what_runs_already(house):
    house.add("mac")
    first = house.launch()
    house.wait_for("ready [")
    second = house.launch()
    assert second.wait(WAIT_S) == 3
    assert f"it runs already (pid {first.pid}, model " in house.text()
    assert first.poll() is None


def test_a_slow_start_is_told_and_can_be_stopped(house):
    house.add("mac", "await asyncio.sleep(60)")
    launch = house.launch()
    house.wait_for("s: waiting for mac")
    launch.send_signal(signal.SIGINT)
    assert launch.wait(WAIT_S) == 0
    assert "ready [" not in house.text()

"""A folder of tiny services and the launches started on it: the real launch, supervisor and skeletons around them.

`House` starts a launch as a process of its own, reads what it says, finds the pids of its processes, and ends with
nothing left running. Used by the tests beside it.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from common.wire.messages import LaunchStatus, ProcessStatus
from services.launch.inquiry import ask_launch
from services.launch.ports import free_ports

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 30.0

SERVICE = """
import asyncio, os, sys, threading, time
from pathlib import Path
from common.errors import ModelError
from services.runtime.service import run_service

HANG = Path({folder!r}) / "hang-{name}"

def work(life):
    slot = life.crash_slot()
    while True:
        slot.write("reading r1, 256 of 1024 tokens done")
        life.work += 0 if HANG.exists() else 1
        time.sleep(0.05)

async def body(life):
    print("pid", life.process, os.getpid(), flush=True)
    {body}
    if "{name}" == "mac":
        threading.Thread(target=work, args=(life,), daemon=True).start()
    await life.ready({{"http": "http://127.0.0.1:1"}})
    await life.stopping.wait()
    {last}

raise SystemExit(run_service("{name}", body, metrics_port=0))
"""
WORKER = """
import os, time
from common.config import load_settings
from common.log import configure_log
from device.control import Control, ControlServer
from device.life import live
from device.link_server import listen

def body(life):
    print("pid worker", os.getpid(), flush=True)
    told = lambda: {"pid": os.getpid(), "state": life.state, "beat": time.monotonic_ns(), "link": "127.0.0.1:9"}
    control = Control(lambda: {"state": "ready", "tail_state": "no host", "tail_chunks": 0}, [], told)
    server = ControlServer(listen("127.0.0.1", settings.worker.control_port), control)
    server.start()
    life.ready()
    life.stopping.wait()
    server.stop(0.3)

settings = load_settings()
configure_log("worker")
raise SystemExit(live(settings, body))
"""
LAUNCHER = """
import os, sys
from pathlib import Path
from common.config import load_settings
from common.errors import OutriggerError
from services.launch import launch, running, supervisor, vigil
from services.launch.lock import RunLock
from services.launch.programs import Program
from services.runtime.run_dir import open_run_dir

running.SAY_AFTER_S, running.WATCH_S, supervisor.ANSWER_S = 0.5, 0.2, 2.0
vigil.RETRY_S_MAX = float(os.environ.get("TEST_RETRY_S_MAX", "60"))
folder = Path(sys.argv[1])
settings = load_settings()
drain_s = {"gateway": settings.gateway.drain_s}
programs = tuple(
    Program(path.stem, (sys.executable, str(path)), path.stem != "worker", drain_s.get(path.stem, 0.0))
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

    def __init__(self, folder: Path, **environ: str) -> None:
        self.folder = folder
        self.run_dir = folder / "run"
        self.launches: list[subprocess.Popen] = []
        (folder / "programs").mkdir()
        self.environ = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OUTRIGGER_CONFIG": "",
            "OUTRIGGER_RUN_DIR": str(self.run_dir),
            "OUTRIGGER_LISTEN_CONTROL_PORT": str(free_ports(1)[0]),
            **environ,
        }

    def add(self, name: str, body: str = "pass", last: str = "pass") -> None:
        """A service that does `body` before it is ready and `last` when told to stop."""
        text = SERVICE.format(name=name, body=body, last=last, folder=str(self.folder))
        (self.folder / "programs" / f"{name}.py").write_text(text)

    def add_worker(self) -> None:
        (self.folder / "programs" / "worker.py").write_text(WORKER)

    def launch(self) -> subprocess.Popen:
        with (self.folder / f"out{len(self.launches)}").open("wb") as out:
            command = [sys.executable, "-c", LAUNCHER, str(self.folder)]
            self.launches.append(subprocess.Popen(command, env=self.environ, stdout=out, stderr=out))
        return self.launches[-1]

    def text(self, number: int = -1) -> str:
        """What a launch said."""
        return (self.folder / f"out{range(len(self.launches))[number]}").read_text()

    def log(self, name: str) -> str:
        return (self.run_dir / f"{name}.log").read_text()

    def wait_for(self, phrase: str) -> None:
        wait_until(lambda: phrase in self.text(), self.text)

    def pids(self, name: str) -> list[int]:
        """Of all lives of a process in this run."""
        return [int(pid) for pid in re.findall(rf"pid {name} (\d+)", self.log(name))]

    def all_pids(self) -> list[int]:
        return [pid for log in self.run_dir.glob("*.log") for pid in self.pids(log.stem)]

    def supervisor_pid(self) -> int:
        return int((self.run_dir / "supervisor.pid").read_text())

    def status(self) -> LaunchStatus:
        return ask_launch(self.run_dir)

    def process(self, name: str) -> ProcessStatus:
        return next(each for each in self.status().processes if each.process == name)

    def kill(self, pid: int, number: int) -> None:
        """Send a signal to one of our processes, and never to a process group by mistake."""
        assert pid > 1, self.text()
        os.kill(pid, number)

    def close(self) -> None:
        for process in self.launches:
            process.kill()
            process.wait()
        wait_until(lambda: not any(map(lives, self.all_pids())), lambda: f"left running: {self.all_pids()}")


def wait_until(condition: Callable[[], bool], told: Callable[[], str]) -> None:
    """Wait for something that must happen."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.02)


def lives(pid: int) -> bool:
    """Whether a process runs. One that ended and that nobody asked about yet does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False

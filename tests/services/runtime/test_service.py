"""Aim: a process tells how far it is, leaves soon when told, when its parent is gone or when it fails, and says why in
one line.

Method: small services of this file run as real processes; they are signalled, orphaned and broken.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from urllib.request import urlopen

import pytest

from common.crash_note import note_path, read_note
from common.wire.routes import LIFE
from services.runtime.bus import Owner
from services.runtime.endpoints import route_endpoint

ROOT = Path(__file__).resolve().parents[3]
WAIT_S = 20.0

SERVICE = """
import asyncio, sys, time
from common.errors import ModelError, SettingError
from services.runtime.service import run_service

async def body(life):
    {body}

raise SystemExit(run_service("mac", body, metrics_port=0))
"""
WAITS = "await life.ready({'http': 'x'}); await life.stopping.wait()"


class Child:
    """A service as a process, its output in a file."""

    def __init__(self, folder: Path, body: str, parent: int | None = None, **environ: str) -> None:
        script = folder / "service_under_test.py"
        script.write_text(SERVICE.format(body=textwrap.indent(body, "    ").strip()))
        self.log = folder / "out.log"
        env = {
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "OUTRIGGER_RUN_DIR": str(folder),
            "OUTRIGGER_CONFIG": "",
        }
        env |= environ | ({"OUTRIGGER_PARENT_PID": str(parent)} if parent else {})
        with self.log.open("wb") as out:
            self.process = subprocess.Popen([sys.executable, str(script)], env=env, stdout=out, stderr=out)

    def text(self) -> str:
        return self.log.read_text()

    def wait_for(self, phrase: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while phrase not in self.text():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.01)

    def events(self) -> list[dict]:
        return [json.loads(line) for line in self.text().splitlines() if line.startswith("{")]

    def states(self) -> list[str]:
        return [event["event"] for event in self.events() if event["event"].startswith("process ")]

    def end(self) -> int:
        return self.process.wait(WAIT_S)


@pytest.fixture
def start(run_dir):
    children = []

    def start_child(body: str, **kwargs) -> Child:
        children.append(Child(run_dir, body, **kwargs))
        return children[-1]

    yield start_child
    for child in children:
        child.process.kill()
        child.process.wait()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_drains_and_ends_with_code_0(start, number):
    child = start(WAITS)
    child.wait_for("process serving")
    child.process.send_signal(number)
    assert child.end() == 0
    assert child.states() == [f"process {s}" for s in ("starting", "ready", "serving", "draining", "stopped")]


def test_a_process_that_hangs_leaves_all_the_same_and_says_so(start):
    child = start("await life.ready()\ntime.sleep(60)")
    child.wait_for("process serving")
    child.process.terminate()
    assert child.end() == 1
    assert child.text().splitlines()[-1] == "mac did not stop in 1.7 s and left at once"


def test_a_second_signal_ends_at_once(start):
    child = start(f"{WAITS}; await asyncio.sleep(60)")
    child.wait_for("process serving")
    child.process.terminate()
    child.wait_for("draining")
    child.process.terminate()
    assert child.end() == 1
    assert "was told again to stop" in child.text()


def test_loading_is_interrupted_by_a_signal(start):
    child = start("await asyncio.sleep(60); await life.ready()")
    child.wait_for("process starting")
    child.process.terminate()
    assert child.end() == 0
    assert "process ready" not in child.text()


@pytest.mark.parametrize(
    ("body", "code", "last_line"),
    [
        ("raise ModelError('a.gguf: not a model')", 1, "mac: a.gguf: not a model"),
        ("raise SettingError('host.model = x')", 2, "mac: host.model = x"),
        ("raise ValueError('two\\nlines')", 1, "mac: ValueError: two lines"),
        (
            "async def broken(): raise KeyError('k')\nlife.spawn(broken(), 'b')\n" + WAITS,
            1,
            "mac: KeyError: 'k'",
        ),
        ("await life.ready(); life.fail(ModelError('gone')); await asyncio.sleep(60)", 1, "mac: gone"),
    ],
    ids=["model", "setting", "bug", "task", "told to fail"],
)
def test_a_failure_is_the_last_line_and_an_exit_code(start, body, code, last_line):
    child = start(body)
    assert child.end() == code
    assert child.text().splitlines()[-1] == last_line


def test_a_bug_keeps_its_trace_in_the_log(start):
    child = start("raise ValueError('oops')")
    child.end()
    (failed,) = [event for event in child.events() if event["event"] == "process failed"]
    assert "ValueError: oops" in failed["exception"]


def test_a_bad_setting_stops_the_start(start):
    child = start(WAITS, OUTRIGGER_N_CTX="7")
    assert child.end() == 2
    assert "host.n_ctx = '7' (environment variable OUTRIGGER_N_CTX)" in child.text()
    assert child.states() == []


def test_metrics_are_served(start):
    child = start(WAITS)
    child.wait_for("process serving")
    url = next(event["metrics"] for event in child.events() if event["event"] == "process serving")
    with urlopen(url, timeout=WAIT_S) as answer:
        assert b"outrigger_generation_tokens_total 0.0" in answer.read()


def test_a_native_crash_leaves_a_trace(start):
    child = start("import ctypes; ctypes.string_at(0)")
    assert child.end() == -signal.SIGSEGV
    assert "Fatal Python error: Segmentation fault" in child.text()


def test_an_orphan_leaves(run_dir, start):
    parent = subprocess.Popen(
        [sys.executable, "-c", MIDDLE, str(run_dir)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        text=True,
    )
    pid = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + WAIT_S
    while _lives(pid):
        assert time.monotonic() < deadline, "the orphan stayed"
        time.sleep(0.02)
    assert "is gone" in (run_dir / "out.log").read_text()


MIDDLE = f"""
import os, sys, time
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
from test_service import Child, WAITS
child = Child(Path(sys.argv[1]), WAITS, parent=os.getpid())
child.wait_for("process ready")
print(child.process.pid, flush=True)
time.sleep(60)
"""


def _lives(pid: int) -> bool:
    """Whether a process runs. One that ended and that nobody asked about yet does not."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False


def test_launch_hears_every_state_and_opens_the_house(run_dir, start):
    async def talk():
        async with Owner(LIFE, route_endpoint(run_dir, LIFE)) as launch:
            child = start(WAITS, parent=os.getpid())
            heard = []
            async for received in launch:
                if type(received.message).__name__ == "Beat":
                    continue
                heard.append(received.message.state)
                if heard[-1] == "ready":
                    assert received.message.listens["http"] == "x"
                    await launch.send(received.message.__class__("launch", 1, "serving"), to=received.peer)
                if heard[-1] == "serving":
                    child.process.terminate()
                if heard[-1] == "stopped":
                    break
            assert heard == ["starting", "ready", "serving", "draining", "stopped"]
            assert await asyncio.to_thread(child.end) == 0

    asyncio.run(asyncio.wait_for(talk(), 60))


def test_beats_carry_the_work_done(run_dir, start):
    async def talk():
        async with Owner(LIFE, route_endpoint(run_dir, LIFE)) as launch:
            start("life.work = 7\n" + WAITS, parent=os.getpid())
            async for received in launch:
                if type(received.message).__name__ == "Beat":
                    assert received.message.work == 7
                    return

    asyncio.run(asyncio.wait_for(talk(), 60))


def test_a_thread_that_does_not_hear_does_not_keep_the_process(start):
    child = start("await asyncio.to_thread(time.sleep, 60); await life.ready()")
    child.wait_for("process starting")
    child.process.terminate()
    assert child.end() == 0
    assert "process stopped" in child.text()


def test_the_interpreter_does_not_end_under_a_daemon_thread(start):
    """What a thread in native code works on would be freed under it."""
    computes = "threading.Thread(target=time.sleep, args=(60,), daemon=True).start()"
    child = start(f"import atexit, threading\natexit.register(print, 'freed')\n{computes}\n{WAITS}")
    child.wait_for("process serving")
    child.process.terminate()
    assert child.end() == 0
    assert "freed" not in child.text()


def test_what_runs_may_end_within_the_drain_it_asked_for(start):
    child = start(f"life.allow_drain(20)\n{WAITS}; await asyncio.sleep(2.5)")
    child.wait_for("process serving")
    child.process.terminate()
    assert child.end() == 0


def test_a_killed_process_leaves_word_of_what_it_did_in_native_code(run_dir, start):
    child = start(f"slot = life.crash_slot()\nslot.write('reads positions 0-255')\n{WAITS}")
    child.wait_for("process serving")
    child.process.kill()
    child.end()
    assert read_note(run_dir, "mac", child.process.pid) == ["reads positions 0-255"]
    again = start(WAITS)
    again.wait_for("process serving")
    again.process.terminate()
    again.end()
    assert read_note(run_dir, "mac", again.process.pid) == []
    assert not note_path(run_dir, "mac", again.process.pid).exists()

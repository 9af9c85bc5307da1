"""Aim: whatever ends or stops a process, it is noticed, told in one line and repaired, or everything leaves.

Method: the real launch and supervisor over tiny services of house.py; every signal that kills, one that stops, a
working thread that hangs, a crash loop; the supervisor killed and stopped.
"""

from __future__ import annotations

import resource
import signal
import tempfile
from pathlib import Path

import pytest

from tests.services.launch.house import WAIT_S, House, lives, wait_until

QUICK = {"OUTRIGGER_SILENCE_S": "3", "OUTRIGGER_STALL_S": "4"}


@pytest.fixture(scope="module")
def running():
    """Three processes that serve; each test leaves them so."""
    with tempfile.TemporaryDirectory(prefix="outrigger-test-", ignore_cleanup_errors=True) as folder:
        house = House(Path(folder), TEST_RETRY_S_MAX="0.5", **QUICK)
        house.add("gateway")
        house.add("mac")
        house.add_worker()
        house.launch()
        house.wait_for("ready [")
        yield house
        house.close()


@pytest.fixture
def house():
    with tempfile.TemporaryDirectory(prefix="outrigger-test-", ignore_cleanup_errors=True) as folder:
        made = House(Path(folder), **QUICK)
        yield made
        made.close()


def whole_again(house: House, name: str, former_pid: int) -> None:
    """Wait until another life of `name` serves."""
    well = ("ready", "serving")
    wait_until(
        lambda: house.process(name).pid != former_pid and house.process(name).state in well, house.text
    )


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (
            signal.SIGKILL,
            "killed by SIGKILL (by hand, or because memory was short), while reading r1, 256 of",
        ),
        (signal.SIGSEGV, "crashed with SIGSEGV in "),
        (signal.SIGTERM, "it was told to stop by somebody else"),
    ],
    ids=["KILL", "SEGV", "TERM"],
)
def test_a_kill_is_told_with_what_ran_and_the_process_started_again(running, number, why):
    before, worker = running.process("mac"), running.process("worker")
    running.kill(before.pid, number)
    running.kill(worker.pid, number)  # it is on no bus, and counted in again all the same
    whole_again(running, "mac", before.pid)
    whole_again(running, "worker", worker.pid)
    assert running.process("worker").last_error
    after = running.process("mac")
    assert after.restarts == before.restarts + 1
    assert why in after.last_error
    assert number == signal.SIGTERM or after.last_error.endswith("while reading r1, 256 of 1024 tokens done")
    running.wait_for(f"mac was started again (pid {after.pid})")
    assert f"mac (pid {before.pid}) ended: {after.last_error}" in running.text()
    assert running.process("gateway").restarts == 0


def test_who_is_stopped_or_hangs_is_told_and_then_replaced(running):
    """At the same time: a gateway and a worker that are stopped (SIGSTOP), a mac whose working thread hangs."""
    before = {name: running.process(name) for name in ("gateway", "worker", "mac")}
    running.kill(before["gateway"].pid, signal.SIGSTOP)
    running.kill(before["worker"].pid, signal.SIGSTOP)
    hang = running.folder / "hang-mac"
    hang.touch()
    for name, state in {"gateway": "silent", "worker": "silent", "mac": "stuck"}.items():
        running.wait_for(f"{name} (pid {before[name].pid}) is {state}: ")
    wait_until(lambda: running.process("mac").pid != before["mac"].pid, running.text)
    hang.unlink()
    for name in before:
        whole_again(running, name, before[name].pid)
        assert not lives(before[name].pid)
    why = {name: running.process(name).last_error for name in before}
    assert why["gateway"].startswith("ended by outrigger: no sign of life for ")
    assert why["worker"].startswith("ended by outrigger: no sign of life for ")
    assert why["mac"].startswith("ended by outrigger: its working thread took no turn for ")
    assert why["mac"].endswith(", while reading r1, 256 of 1024 tokens done")
    assert "in work" in running.log("mac"), "faulthandler wrote where each thread stood"


def test_a_crash_loop_waits_longer_each_time_and_says_why(house):
    house.add("gateway")
    house.add("mac", "if (HANG.parent / 'broken').exists(): raise ModelError('a.gguf: not a model')")
    house.launch()
    house.wait_for("ready [")
    (house.folder / "broken").touch()
    house.kill(house.process("mac").pid, signal.SIGKILL)
    house.wait_for("mac is tried again in 1 s")
    house.wait_for("mac is tried again in 2 s")
    told = house.process("mac")
    assert told.state in ("backoff", "starting")
    assert told.last_error == "a.gguf: not a model (exit code 1)"
    (house.folder / "broken").unlink()
    whole_again(house, "mac", told.pid)
    assert house.process("mac").restarts >= 2


def test_a_killed_supervisor_takes_everything_with_it_and_is_told(house):
    house.add("gateway")
    house.add("mac")
    launch = house.launch()
    house.wait_for("ready [")
    pids = house.all_pids()
    house.kill(house.supervisor_pid(), signal.SIGKILL)
    assert launch.wait(WAIT_S) == 3
    assert "does not answer" in house.text()
    assert not any(map(lives, pids))


def test_a_stopped_supervisor_keeps_nobody_from_leaving(house):
    house.add("mac")
    launch = house.launch()
    house.wait_for("ready [")
    pids = [*house.all_pids(), house.supervisor_pid()]
    house.kill(house.supervisor_pid(), signal.SIGSTOP)
    assert launch.wait(WAIT_S) == 3
    assert not any(map(lives, pids))


def test_what_a_process_has_to_say_is_told_once_and_shown(house):
    house.add("gateway")
    house.add("mac", "life.spawn(speak(life), 'speak')")
    path = house.folder / "programs" / "mac.py"
    speak = """
async def speak(life):
    while True:
        await asyncio.sleep(0.1)
        await life.say("a word")
"""
    path.write_text(path.read_text().replace("async def body", speak + "\n\nasync def body"))
    launch = house.launch()
    house.wait_for("mac: a word")
    assert (house.process("mac").state, house.process("mac").detail) == ("serving", "a word")
    assert house.text().count("mac: a word") == 1
    launch.send_signal(signal.SIGINT)
    assert launch.wait(WAIT_S) == 0


@pytest.mark.skipif(
    not hasattr(resource, "prlimit"), reason="limits of other processes can be set on Linux only"
)
def test_a_disk_that_becomes_full_ends_nobody(house):
    house.add("gateway")
    house.add("mac")
    launch = house.launch()
    house.wait_for("ready [")
    for pid in (launch.pid, house.supervisor_pid(), *house.all_pids()):
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, 1))  # from now on no file grows
    for _ in range(2):
        former = house.process("mac").pid
        house.kill(former, signal.SIGKILL)
        whole_again(house, "mac", former)
    assert house.process("gateway").state == "serving"
    launch.send_signal(signal.SIGINT)
    assert launch.wait(WAIT_S) in (0, 120)  # 120: the interpreter found no room for its last words

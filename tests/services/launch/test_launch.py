"""Aim: a launch starts all, says when it is ready, survives a crash of one, and ends with nothing left running.

Method: the real launch, supervisor and process skeleton, with tiny services of this file in place of ours; the launch
runs as a process of its own and is signalled, killed and started twice.
"""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

import pytest

from tests.services.launch.house import WAIT_S, House, lives, wait_until


@pytest.fixture
def house():
    with tempfile.TemporaryDirectory(prefix="outrigger-test-", ignore_cleanup_errors=True) as folder:
        made = House(Path(folder), OUTRIGGER_DRAIN_S="60")
        yield made
        made.close()


def test_all_start_and_a_ctrl_c_leaves_nothing_behind(house):
    house.add("gateway")
    house.add("mac")
    house.add_worker()
    launch = house.launch()
    house.wait_for("ready ['gateway', 'mac', 'worker']")
    pids = house.all_pids()
    assert len(pids) == 3
    assert all(map(lives, pids))
    wait_until(lambda: "process serving" in house.log("mac"), house.text)
    status = house.status()
    assert (status.state, status.pid) == ("serving", launch.pid)
    assert {each.process: (each.pid in pids, each.restarts) for each in status.processes} == dict.fromkeys(
        ("gateway", "mac", "worker"), (True, 0)
    )
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
    assert f"it runs already (pid {first.pid}, serving, model " in house.text()
    assert first.poll() is None


def test_a_slow_start_is_told_and_can_be_stopped(house):
    house.add("mac", "await asyncio.sleep(60)")
    launch = house.launch()
    house.wait_for("s: waiting for mac")
    launch.send_signal(signal.SIGINT)
    assert launch.wait(WAIT_S) == 0
    assert "ready [" not in house.text()


def test_the_gateway_drains_first_and_what_it_needs_serves_meanwhile(house):
    house.add("gateway", body="life.allow_drain(30)", last=DRAINS)
    house.add("mac")
    launch = house.launch()
    house.wait_for("ready [")
    launch.terminate()
    wait_until(lambda: house.status().state == "stopping", house.text)
    wait_until(lambda: house.process("gateway").state == "draining", house.text)
    assert house.process("mac").state == "serving"
    (house.folder / "drained").touch()
    assert launch.wait(WAIT_S) == 0
    order = [line for line in (house.log("gateway") + house.log("mac")).splitlines() if "process " in line]
    assert "process stopped" in order[-1]


def test_a_second_signal_does_not_wait_for_answers(house):
    house.add("gateway", body="life.allow_drain(60)", last=DRAINS)
    house.add("mac")
    launch = house.launch()
    house.wait_for("ready [")
    launch.terminate()
    wait_until(lambda: house.process("gateway").state == "draining", house.text)
    launch.terminate()
    assert launch.wait(WAIT_S) == 0
    assert "was told again to stop" in house.log("gateway")


DRAINS = """
    while not (HANG.parent / "drained").exists():
        await asyncio.sleep(0.05)
"""

"""Aim: the table says of each process what launch knows, errors in full sentences below it; spans read well.

Method: statuses in, text out; the answer of a real launch is tested in tests/services/launch and tests/journey.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from common.metrics import Metrics
from common.wire.messages import LaunchStatus, ProcessStatus
from services.cli.held_view import held_facts, held_text
from services.cli.status import ERROR_CHARS_MAX, seconds_text, status_text
from services.runtime.exposition import Exposition

STATUS = LaunchStatus(
    pid=1,
    state="serving",
    model="tiny",
    http="http://127.0.0.1:8080",
    uptime_s=3700.0,
    processes=(
        ProcessStatus(
            "gateway", "serving", 2, 90.0, 0, listens={"http": "http://127.0.0.1:8080", "metrics": "x"}
        ),
        ProcessStatus("mac", "stuck", 3, 59.0, 2, "in one step for 31 s", "crashed with SIGSEGV", 60.0),
        ProcessStatus(
            "bridge", "backoff", 0, 0.0, 7, "tried again in 4 s", "e" * 500, 4.0, {"link": "ipc:///x"}
        ),
    ),
)


def test_the_table_and_the_errors_below_it():
    lines = status_text(STATUS, Path("/run")).splitlines()
    assert lines[0] == "serving: tiny at http://127.0.0.1:8080/v1"
    rows = [line.split() for line in lines[2:7]]
    assert rows[0] == ["process", "state", "pid", "uptime", "restarts", "what"]
    assert rows[1] == "launch serving 1 1 h 1 min 0 /run".split()
    assert rows[2] == "gateway serving 2 1 min 0 http://127.0.0.1:8080".split()
    assert rows[3] == "mac stuck 3 59 s 2 in one step for 31 s".split()
    assert rows[4] == "bridge backoff - - 7 tried again in 4 s".split()
    assert lines[8] == "mac ended 1 min ago: crashed with SIGSEGV"
    assert lines[9].startswith("bridge ended 4 s ago: eee") and lines[9].endswith("...")
    assert len(lines[9]) <= ERROR_CHARS_MAX + len("bridge ended 4 s ago: ")
    assert {line.index(word) for line, word in zip(lines[2:5], ("pid", "1 ", "2 "), strict=True)} == {
        lines[2].index("pid")
    }


def test_old_pages_are_told_below_the_table_once_some_are_kept():
    broker, mac = Metrics("broker"), Metrics("mac")
    with Exposition(broker, 0) as of_broker, Exposition(mac, 0) as of_mac:
        processes = tuple(
            ProcessStatus(name, "serving", 2, 90.0, 0, listens={"metrics": url})
            for name, url in (
                ("broker", of_broker.url),
                ("mac", of_mac.url),
                ("gateway", "http://127.0.0.1:1/"),
            )
        )
        status = msgspec.structs.replace(STATUS, processes=processes)
        assert held_facts(status) is None
        broker.set("journal_bytes", 2.5e6)
        for where, n_tokens in (("journal", 2048), ("journal_only", 1536), ("worker", 1024)):
            broker.set("held_tokens", n_tokens, where=where)
        assert held_text(held_facts(status)) == (
            "old pages: 2,048 tokens in the journal (2.5 MB on disk), 1,536 of them out of the host's memory, "
            "1,024 on the worker"
        )
        broker.add("journal_failures_total", cause="disk_full")
        mac.set("journal_lag_pages", 7)
        told = held_text(held_facts(status)).splitlines()[1]
    assert told.strip() == "pages that wait for the disk: 7; failed requests to the journal: 1"
    assert held_facts(status) is None, "nobody answers any more"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (59.9, "59 s"), (60, "1 min"), (3661, "1 h 1 min"), (90_000, "1 d 1 h")],
)
def test_spans_for_people(seconds, text):
    assert seconds_text(seconds) == text


def outrigger(run_dir: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OUTRIGGER_RUN_DIR": str(run_dir), "OUTRIGGER_CONFIG": ""}
    return subprocess.run(
        [sys.executable, "-m", "services.cli.main", *arguments],
        env=environ,
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_nothing_runs_is_said_by_each_command_in_its_way(tmp_path):
    told = outrigger(tmp_path / "run", "status")
    assert (told.returncode, told.stdout.startswith("nothing runs (run directory ")) == (3, True)
    down = outrigger(tmp_path / "run", "down")
    assert (down.returncode, down.stdout.startswith("nothing runs")) == (0, True)
    chat = outrigger(tmp_path / "run", "chat")
    assert chat.returncode and "nothing runs (run directory " in chat.stderr
    logs = outrigger(tmp_path / "run", "logs")
    assert (logs.returncode, "nothing ran here yet" in logs.stderr) == (3, True)


def test_what_a_killed_launch_left_is_told_as_such(tmp_path):
    (tmp_path / "launch.lock").touch()
    (tmp_path / "launch.json").write_text('{"pid": 4242, "state": "serving"}')
    told = outrigger(tmp_path, "status")
    assert told.returncode == 3
    assert "the last launch here (pid 4242) was killed" in told.stdout
    as_json = outrigger(tmp_path, "status", "--json")
    assert msgspec.json.decode(as_json.stdout) == {"state": "down", "run_dir": str(tmp_path)}

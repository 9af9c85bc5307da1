"""A doctor's findings from facts, and the command on this machine and on a real worker.

Method: facts written by hand, one of them changed at a time; then `outrigger doctor` itself, with an emulated cable.
"""

from __future__ import annotations

import getpass
import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec import structs

from common.config import load_settings
from common.model.split import write_tail
from common.model.synthetic import ensure_preset
from services.bench.processes import Processes, free_port
from services.broker.journal_lock import claim
from services.cli.doctor import command
from services.launch.doctor.facts import Cable, Facts, FarEnd, Interface, Journal, Machine, Model, Port
from services.launch.doctor.findings import Finding, cable_class, findings
from services.launch.doctor.journal import look_at_journal

WORKER = FarEnd(True, True, "", "Darwin arm64", "ready", 8192, 4096, 0, 90.0, True, "")
WELL = Facts(
    "0.1.0",
    Machine("Darwin", "arm64", "Apple M9", 12, 65_536, 40_000, "3.12.1", 0),
    Model("", "qwen35", 64, 16_000, 40, "0123456789ab"),
    Cable((Interface(True, 10_000),), False, 100.0, 1100.0),
    WORKER,
    (),
    False,
    500_000,
    16_384,
)


HOLDS = Journal(True, 65_536, 131_072, 8192, 16_384, 100)


def bad(facts: Facts) -> list[Finding]:
    return [each for each in findings(facts) if each.level == "problem"]


def test_what_is_well_is_told_so_with_nothing_to_do() -> None:
    assert {each.level for each in findings(WELL)} == {"well"}
    assert len({each.topic for each in findings(WELL)}) >= 9


@pytest.mark.parametrize(
    ("change", "topic", "remedy"),
    [
        ({"machine": structs.replace(WELL.machine, memory_free_mb=8000)}, "memory", "--split-decode"),
        ({"model": structs.replace(WELL.model, file_mb=38_000)}, "gpu", "iogpu.wired_limit_mb=54285"),
        ({"model": Model("there is no model file")}, "model", "make setup"),
        ({"cable": structs.replace(WELL.cable, bandwidth_mb_s=38.0)}, "cable", "10 Gb/s"),
        ({"worker": FarEnd(True, why_not="refused")}, "worker", "outrigger worker"),
        ({"worker": structs.replace(WORKER, memory_free_mb=100)}, "worker memory", "close apps"),
        ({"worker": structs.replace(WORKER, thermal=2)}, "worker heat", "cool"),
        (
            {"worker": structs.replace(WORKER, greeting="layer 41 differs")},
            "version and tail",
            "outrigger split",
        ),
        ({"journal": structs.replace(HOLDS, problem="no folder")}, "old pages", "OUTRIGGER_JOURNAL_DIR"),
        ({"journal": structs.replace(HOLDS, cap_mb=1000)}, "old pages", "OUTRIGGER_JOURNAL_MIB=16384"),
        ({"journal": HOLDS, "disk_free_mb": 8000}, "old pages", "choose another disk"),
        (
            {"journal": HOLDS, "worker": structs.replace(WORKER, pages="closed")},
            "worker pages",
            "worker.pages_port",
        ),
        (
            {"ports": (Port(8080, "the HTTP API", "HTTP_PORT", "in use", "nginx"),)},
            "ports",
            "OUTRIGGER_HTTP_PORT",
        ),
    ],
)
def test_what_is_not_well_has_a_remedy(change: dict[str, Any], topic: str, remedy: str) -> None:
    found = bad(structs.replace(WELL, **change))
    assert [each.topic for each in found] == [topic]
    assert remedy in found[0].remedy


def test_old_pages_that_find_room_are_well_and_a_worker_without_pages_is_worth_a_note() -> None:
    found = findings(structs.replace(WELL, journal=HOLDS, worker=structs.replace(WORKER, pages="off")))
    levels = {each.topic: each.level for each in found if each.level != "well" or "pages" in each.topic}
    assert levels == {"old pages": "well", "worker pages": "note"}


def test_the_journals_folder_is_looked_at_and_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "data" / "journal"
    settings = load_settings(
        None,
        {},
        {
            "model": str(ensure_preset("tiny")),
            "n_ctx": 4096,
            "kv_host_tokens": 1024,
            "journal_dir": str(folder),
        },
    )
    looked = look_at_journal(settings, runs=False)
    assert looked.holds and not looked.problem and not folder.exists()
    assert looked.conversation_mb == 4096 * 2 * 2 * 2 * 2 * 32 >> 20, (
        "K, V; layers; heads of 32 elements; f16"
    )
    lock = claim(folder)
    assert "another broker" in look_at_journal(settings, runs=False).problem
    assert not look_at_journal(settings, runs=True).problem
    os.close(lock)
    assert not look_at_journal(settings, runs=False).problem
    folder.rmdir()
    folder.write_text("")
    assert "no folder" in look_at_journal(settings, runs=False).problem


def test_cables_by_measurement_before_what_the_interface_says() -> None:
    slow, fast = Interface(True, 480), Interface(True, 10_000)
    assert cable_class(Cable((slow,))) == "USB 2 class"
    assert cable_class(Cable((fast,))) == "10 Gb/s class"
    assert cable_class(Cable((fast,), bandwidth_mb_s=37.0)) == "USB 2 class"
    assert cable_class(Cable((Interface(True, None),))) == ""


def test_a_worker_behind_a_slow_cable_is_examined_and_the_profile_is_nobodys(
    tmp_path: Path, monkeypatch: Any
) -> None:
    model, tail, profile = ensure_preset("tiny"), tmp_path / "tail.gguf", tmp_path / "profile.json"
    write_tail(model, 2, tail)
    port, control = free_port(), free_port()
    worker = {"tail": str(tail), "listen_port": port, "listen_control_port": control, "worker_ctx": 1024}
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    for name, value in {
        "RUN_DIR": tmp_path / "run",
        "DATA_DIR": tmp_path,
        "WORKER_PORT": port,
        "WORKER_CONTROL_PORT": control,
        "SPLIT_LAYER": 2,
        "HTTP_PORT": taken.getsockname()[1],
    }.items():
        monkeypatch.setenv(f"OUTRIGGER_{name}", str(value))
    with taken, Processes() as processes:
        settings = load_settings(None, {}, {**worker, "worker_emulate": "usb2,rate=20MB/s"})
        processes.start("worker", "device.worker", settings)
        processes.connect("worker", lambda: socket.create_connection(("127.0.0.1", control)).close())
        processes.connect("worker", lambda: socket.create_connection(("127.0.0.1", port)).close())
        arguments = ["--model", str(model), "--worker-host", "127.0.0.1", "--profile", str(profile)]
        result = CliRunner().invoke(command, arguments)
    assert result.exit_code == 1, result.output
    assert "USB 2 class" in result.output
    assert "OUTRIGGER_HTTP_PORT" in result.output
    assert "fingerprint are the same" in result.output
    said = profile.read_text()
    assert json.loads(said)["cable"]["round_trip_us"] > 100
    for personal in (socket.gethostname(), os.path.expanduser("~"), str(tmp_path), f'"{getpass.getuser()}"'):
        assert personal not in said

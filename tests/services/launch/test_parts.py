"""Aim: the pure parts of a launch: which processes, what their configuration says, why one ended, whose a port is.

Method: settings, log texts and real sockets in; values out.
"""

from __future__ import annotations

import configparser
import errno
import json
import os
import shlex
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.config import load_settings
from common.config.page_workers import worker_numbers
from common.errors import ServiceError, SettingError
from common.wire.messages import Beat, StateChanged
from services.launch.lock import RunLock
from services.launch.logs import last_error, last_lines, log_path, set_aside
from services.launch.ports import check_ports, free_ports, holder, needed_ports, why_taken
from services.launch.programs import (
    Program,
    programs_for,
    starts_worker,
    with_local_worker,
    with_page_workers_here,
)
from services.launch.roster import Roster
from services.launch.supervisor import ProcessInfo, Supervisor, configuration
from services.launch.words import curl_line, ready_text


def settings(**flags):
    return load_settings(environ={}, flags=flags)


@pytest.mark.parametrize(
    ("flags", "names"),
    [
        ({}, ["gateway", "mac", "broker", "bridge", "worker"]),
        ({"split": "off"}, ["gateway", "mac", "broker"]),
        ({"worker_host": "169.254.7.7"}, ["gateway", "mac", "broker", "bridge"]),
        ({"worker_host": "169.254.7.7", "split": "off"}, ["gateway", "mac", "broker"]),
        (
            {"worker_host": "169.254.7.7", "page_workers": "169.254.9.1,b:7"},
            ["gateway", "mac", "broker", "bridge", "bridge-1", "bridge-2"],
        ),
    ],
)
def test_which_processes_run(flags, names):
    given_settings = settings(**flags)
    programs = programs_for(given_settings, starts_worker(given_settings))
    assert [program.name for program in programs] == names


def test_page_workers_that_are_started_here_are_where_their_bridges_look():
    wired = with_page_workers_here(settings(split="off", page_workers="2"), (5, 6))
    assert wired.bridge.page_workers == "127.0.0.1:5,127.0.0.1:6"
    programs = programs_for(wired, False, 2)
    assert [each.name for each in programs[3:]] == ["bridge-1", "bridge-2", "worker-1", "worker-2"]
    assert [each.command[-1] for each in programs[3:]] == ["1", "2", "5", "6"]
    assert [each.control_port for each in programs[5:]] == [5, 6]
    assert not any(each.on_bus for each in programs[5:])
    assert worker_numbers(wired) == (1, 2)


def test_every_bridge_has_a_port_for_its_metrics():
    needed = needed_ports(settings(page_workers="a,b"), local_worker=False)
    assert [port for _, port, purpose, *_ in needed if "bridge" in purpose] == [9573, 9574, 9575]
    needed = needed_ports(settings(page_workers="a", split="off", bridge_metrics_port=0), local_worker=False)
    assert [port for _, port, purpose, *_ in needed if "bridge" in purpose] == [0]


def test_worker_and_bridge_are_pointed_at_each_other():
    wired = with_local_worker(settings(n_ctx=2048), "/t.gguf", (5, 6))
    assert (wired.worker.port, wired.worker.control_port) == (5, 6)
    assert (wired.bridge.worker_host, wired.bridge.worker_port, wired.bridge.worker_control_port) == (
        "127.0.0.1",
        5,
        6,
    )
    assert (wired.worker.model, wired.worker.n_ctx) == ("/t.gguf", 2048)


PATHS = st.text(
    st.characters(codec="utf-8", exclude_characters="\0\n\r", exclude_categories=("Cc", "Zs", "Zl", "Zp")),
    min_size=1,
    max_size=20,
)


@given(st.lists(PATHS, min_size=1, max_size=3), st.text("a%(s) b", max_size=10))
def test_the_supervisors_configuration_keeps_every_argument(arguments, odd):
    from pathlib import Path

    command = (*arguments, odd)
    text = configuration(Path("/run/50%x"), [Program("mac", command)])
    parser = configparser.RawConfigParser()
    parser.read_string(text)
    written = parser["program:mac"]["command"].replace("%%", "%")
    assert "%" not in parser["program:mac"]["command"].replace("%%", "")
    assert tuple(shlex.split(written)) == command
    assert parser["group:outrigger"]["programs"] == "mac"


def test_a_run_directory_too_long_for_the_supervisors_socket_is_refused(tmp_path):
    with pytest.raises(SettingError, match="OUTRIGGER_RUN_DIR"):
        Supervisor(tmp_path / ("x" * 90))


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("", "it ended without a word"),
        ('{"event": "a", "level": "info"}\n', "it ended without a word"),
        ('{"event": "a", "level": "error", "error": "b"}\n{"event": "c", "level": "info"}\n', "a b"),
        ("Traceback\n  File\nValueError: x\n", "ValueError: x"),
        ('{"event": "a", "level": "error"}\nmac: no model\n', "mac: no model"),
        (
            "Fatal Python error: Segmentation fault\n\nThread 0x1\n  File x\n",
            "Fatal Python error: Segmentation fault",
        ),
    ],
)
def test_the_line_that_says_why(tmp_path, log, said):
    path = log_path(tmp_path, "mac")
    path.write_text(log)
    assert last_error(last_lines(path)) == said


def test_the_last_runs_log_is_kept_beside(tmp_path):
    log_path(tmp_path, "mac").write_text("old")
    set_aside(tmp_path, "mac")
    assert (tmp_path / "mac.log.previous").read_text() == "old"
    assert not log_path(tmp_path, "mac").exists()
    set_aside(tmp_path, "mac")


def info(state: str, pid: int, exit_code: int = 0) -> ProcessInfo:
    return ProcessInfo("mac", state, pid, exit_code, 0)


def test_the_roster_counts_in_who_is_ready():
    roster = Roster(["gateway", "mac"])
    assert roster.waiting_for == ["gateway", "mac"]
    roster.see(info("STARTING", 7), 1.0)
    roster.take(StateChanged("mac", 7, "ready", "", {"metrics": "url"}), b"mac-1", 2.0)
    roster.take(StateChanged("stranger", 8, "ready"), b"s-1", 2.0)
    roster.take(Beat("mac", 7, 5), b"mac-1", 3.0)
    assert roster.waiting_for == ["gateway"]
    assert (roster.members["mac"].work, roster.members["mac"].worked_at) == (5, 3.0)
    assert roster.listens == {"mac": {"metrics": "url"}}
    roster.take(StateChanged("mac", 7, "stopped", "why"), b"mac-1", 4.0)
    assert roster.waiting_for == ["gateway", "mac"]


def test_a_new_life_starts_anew_and_an_old_ones_words_are_nobodys():
    roster = Roster(["mac"])
    roster.see(info("STARTING", 7), 1.0)
    roster.take(StateChanged("mac", 7, "serving"), b"mac-1", 2.0)
    roster.take(StateChanged("mac", 8, "starting"), b"mac-2", 3.0)
    roster.take(StateChanged("mac", 7, "stopped"), b"mac-1", 4.0)
    member = roster.members["mac"]
    assert (member.pid, member.state, member.born_at) == (8, "starting", 3.0)
    roster.see(info("RUNNING", 8), 5.0)
    assert member.born_at == 3.0
    roster.see(info("EXITED", 0, exit_code=1), 6.0)
    assert (member.pid, member.state) == (0, "backoff")
    roster.see(info("EXITED", 0, exit_code=2), 6.0)
    assert member.state == "failed"


def test_a_taken_port_is_told_with_its_holder_and_the_setting():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert why_taken("127.0.0.1", port).errno == errno.EADDRINUSE
        if os.path.exists("/proc/net/tcp"):
            assert f"(pid {os.getpid()})" in holder(port)
        with pytest.raises(ServiceError, match=rf"port {port} .*--port PORT or OUTRIGGER_HTTP_PORT"):
            check_ports(settings(http_port=port), local_worker=False)
    assert holder(port) is None


@pytest.mark.parametrize("host", ["192.0.2.1", "no-such-host.invalid"])
def test_an_address_that_is_not_ours_is_no_taken_port(host):
    with pytest.raises(ServiceError, match=rf"cannot listen on {host}, port 9, for the HTTP API") as raised:
        check_ports(settings(http_host=host, http_port=9), local_worker=False)
    assert "not free" not in str(raised.value)


def test_a_run_directory_that_cannot_be_written_is_a_setting_to_change(tmp_path):
    (tmp_path / "launch.lock").mkdir()
    with pytest.raises(SettingError, match=r"run_dir: cannot write .*launch\.lock.*OUTRIGGER_RUN_DIR"):
        RunLock(tmp_path)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_is_told_and_the_lock_let_go(tmp_path):
    (tmp_path / "launch.partial").symlink_to("/dev/full")
    with pytest.raises(SettingError, match=r"run_dir: cannot write .*no space left"):
        RunLock(tmp_path)
    RunLock(tmp_path).release()  # the link is gone with the first try, and nobody holds the lock


def test_free_ports_are_free_and_differ():
    ports = free_ports(4)
    assert len(set(ports)) == 4
    assert [why_taken("127.0.0.1", port) for port in ports] == [None] * 4


def test_the_pasted_request_is_a_whole_shell_command(tmp_path):
    model = tmp_path / "it's a model.gguf"
    text = ready_text(
        listens={
            "http": "http://127.0.0.1:1",
            "zmq_ipc": "ipc:///r/public",
            "zmq": "tcp://127.0.0.1:5570",
            "zmq_events_ipc": "ipc:///r/events",
        },
        model=model,
        chats=True,
        worker="none",
        run_dir=tmp_path,
        seconds=1.23,
        has_key=True,
        background=False,
    )
    assert "ready after 1.2 s: http://127.0.0.1:1/v1" in text
    words = shlex.split(curl_line("http://127.0.0.1:1", "it's a model").replace("\\\n", " "))
    assert words[:3] == ["curl", "-s", "http://127.0.0.1:1/v1/chat/completions"]
    assert json.loads(words[words.index("-d") + 1])["model"] == "it's a model"
    assert "Bearer $OUTRIGGER_API_KEY" in text
    assert "  zmq     tcp://127.0.0.1:5570  ipc:///r/public\n  events  ipc:///r/events\n" in text
    words = shlex.split(curl_line("http://127.0.0.1:1", "m", chats=False).replace("\\\n", " "))
    assert words[2] == "http://127.0.0.1:1/v1/completions"
    assert json.loads(words[words.index("-d") + 1])["prompt"]

"""The control channel of a running worker: commands, refusals in words, bounded lines, and `watch` until the end."""

from __future__ import annotations

import json
import signal
import socket
from contextlib import closing, suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.limits import CONTROL_LINE_BYTES_MAX, WORKER_CLIENTS_MAX
from device.control import PHASES, Control, ControlServer

from .host_end import host_end
from .worker_process import worker_process

WAIT_S = 20.0


class Line:
    """A client of the control channel."""

    def __init__(self, address):
        self.sock = socket.create_connection(address)
        self.sock.settimeout(20)
        self.file = self.sock.makefile("rb")

    def ask(self, text: str):
        self.sock.sendall(text.encode() + b"\n")
        return self.read()

    def read(self):
        line = self.file.readline()
        return json.loads(line) if line else None

    def close(self):
        self.file.close()
        self.sock.close()


@pytest.fixture
def line(workers):
    with closing(Line(workers["llama"].control)) as line:
        yield line


def test_mem(line):
    answer = line.ask("mem")
    assert 0 < answer["footprint_mb"] < answer["phys_mb"] and 0 < answer["avail_mb"] <= answer["phys_mb"]
    assert answer["thermal"] in (-1, 0, 1, 2, 3)
    assert answer["tail_state"] == "no host" and answer["state"] == "ready"
    assert socket.gethostname() not in json.dumps(answer), "no machine names"


def test_ls_names_the_file_and_no_path(line, cases):
    path = cases["llama"].tail
    assert line.ask("ls") == {"files": [{"name": path.name, "bytes": path.stat().st_size}]}


@pytest.mark.parametrize("phase", PHASES)
def test_mac(line, phase):
    assert line.ask(f"mac {phase}") == {"ok": True}
    assert line.ask(f"mac {phase} 1 22 333") == {"ok": True}


@pytest.mark.parametrize(
    "text",
    ["", "mac", "mac sleeping", "mac ready x", "mac ready 1 2 3 4", "mac ready -1", "mem 1", "ls /", "fetch a b",
     "load a", "nonsense", "\x00\x01", "MEM", "mac ready " + "9" * 400],
)  # fmt: skip
def test_bad_commands_are_answered_in_words(line, text):
    assert set(line.ask(text)) == {"error"}
    assert line.ask("mac ready") == {"ok": True}


@settings(max_examples=100)
@given(st.text(max_size=200))
def test_any_line_has_an_answer(text):
    control = Control(lambda: {"state": "ready", "tail_state": "no host", "tail_chunks": 0}, [], dict)
    answer = json.dumps(control.answer(text))
    assert len(answer) < 1000


def test_an_endless_line_closes_the_connection(line, workers):
    with suppress(ConnectionError):  # closed while it is still being sent
        line.sock.sendall(b"x" * (2 * CONTROL_LINE_BYTES_MAX))
        assert line.file.readline() == b""
    with closing(Line(workers["llama"].control)) as other:
        assert "footprint_mb" in other.ask("mem")


def test_binary_is_answered_or_closed(workers):
    with closing(Line(workers["llama"].control)) as line:
        line.sock.sendall(bytes(range(256)) + b"\n")
        assert line.read() is not None


def test_too_many_clients_are_turned_away(workers):
    lines = [Line(workers["llama"].control) for _ in range(WORKER_CLIENTS_MAX + 3)]
    try:
        answered = 0
        for line in lines:
            with suppress(ConnectionError):
                answered += line.ask("mem") is not None
        # A connection of the test before may still be closing and hold one place.
        assert WORKER_CLIENTS_MAX - 1 <= answered <= WORKER_CLIENTS_MAX
    finally:
        for line in lines:
            line.close()


def test_watch_tells_changes_and_the_end(cases):
    case = cases["llama"]
    with worker_process(case.tail) as worker, closing(Line(worker.control)) as line:
        line.sock.sendall(b"watch\n")
        assert line.read()["state"] == "ready"
        with host_end(worker.link) as end:
            end.greet(case.spec, case.first)
            assert line.read()["state"] == "serving"
            with closing(Line(worker.control)) as other:
                assert other.ask("mem")["tail_state"] in ("idle", "computing")
        assert line.read()["state"] == "ready"
        worker.signal(signal.SIGTERM)
        assert line.read()["state"] == "stopping"
        assert line.read() is None
        assert worker.wait(60) == 0


def test_a_watcher_that_leaves_frees_its_place_at_once(cases):
    """More watchers than there are places, one after the other: none may be turned away for one that has left."""
    with worker_process(cases["llama"].tail) as worker:
        for _ in range(3 * WORKER_CLIENTS_MAX):
            with closing(Line(worker.control)) as line:
                line.sock.sendall(b"watch\n")
                assert line.read()["state"] == "ready"


def test_stopping_with_a_client_inside_is_no_mistake_in_the_log(caplog):
    listener = socket.create_server(("127.0.0.1", 0))
    told = {"state": "ready", "tail_state": "no host", "tail_chunks": 0}
    server = ControlServer(listener, Control(lambda: told, [], dict))
    server.start()
    with closing(Line(listener.getsockname())) as line:
        assert line.ask("mac ready") == {"ok": True}
        server.stop(WAIT_S)
        assert line.read() is None
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []

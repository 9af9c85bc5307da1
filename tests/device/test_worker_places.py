"""Whom a worker serves, and that it outlives what others do to it: two hosts, foreign models, garbage, half-open
connections, its own end. A running worker process over its real sockets.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import psutil
import pytest

from common.errors import FingerprintError, ModelError, RemoteProtocolError, WorkerBusyError
from common.model.spec import ModelSpec
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire.frames import HEADER, RESIDUAL
from common.wire.messages import WANT_LOGITS

from .host_end import HostEnd, chunk2, hello3, host_end, mirror_at, split_output
from .test_control import Line
from .worker_process import CHECKOUT, worker_process


@pytest.fixture
def greeted(case, worker):
    with host_end(worker.link) as end:
        end.greet(case.spec, case.first)
        yield end


# --- who is served


def test_a_second_host_is_refused_while_the_first_answers(case, worker, greeted):
    """The first host answers the worker's PING from its own thread of control: it reads only when asked to."""
    with host_end(worker.link) as second:
        second.send(hello3(case.spec, case.first), epoch=time.time_ns())
        asked = greeted.sock.recv(1, socket.MSG_PEEK)
        assert asked, "the worker asks the first host whether it is alive"
        with pytest.raises(TimeoutError):
            greeted.sock.settimeout(0.2)
            greeted.heard()  # answers the PING, then finds nothing else
        greeted.sock.settimeout(30)
        refused = second.heard()
        assert isinstance(refused, ext.Err2) and refused.code == WorkerBusyError.code
        with pytest.raises(EOFError):
            second.heard()
    assert greeted.ask(chunk2(case.residual(4), 0)).n_valid == 4


def test_the_newest_host_wins_when_the_first_is_silent(case, worker, greeted):
    greeted.ask(chunk2(case.residual(4), 0))
    with host_end(worker.link) as second:
        second.greet(case.spec, case.first)
        assert mirror_at(second) == 0, "another host's rows are gone"
        assert second.ask(chunk2(case.residual(4), 0)).n_valid == 4
        with pytest.raises((EOFError, ConnectionError)):
            greeted.heard()  # the PING it never answered, then the end
        assert mirror_at(second) == 4, "the first one's end touches nothing of the second"


def test_a_host_that_leaves_frees_the_place_at_once(case, worker):
    for _ in range(5):
        with host_end(worker.link) as end:
            end.greet(case.spec, case.first)
            end.send(chunk2(case.residual(200), 0))  # gone before it is answered
    with host_end(worker.link) as end:
        end.greet(case.spec, case.first)
        assert mirror_at(end) == 0


def test_another_model_is_named_from_both_sides(case, cases, worker):
    other = cases["qwen35" if case.spec.arch == "llama" else "llama"]
    with host_end(worker.link) as end:
        text = case.spec.fingerprint_text(case.first).replace("n_embd 64", "n_embd 65")
        answer = end.ask(hello3(case.spec, case.first, text=text), epoch=time.time_ns())
        assert isinstance(answer, ext.Hello3Ok) and answer.text == case.spec.fingerprint_text(case.first)
        refused = end.heard()
        assert refused.code == FingerprintError.code
        assert (
            "n_embd 65" in refused.text and "n_embd 64" in refused.text and "outrigger split" in refused.text
        )
        with pytest.raises(EOFError):
            end.heard()
    with host_end(worker.link) as end:
        first = 2 if case.spec.arch == "qwen35" else 3  # the other model has it, this worker's file has not
        refused = end.ask(hello3(other.spec, 2, split_layer=first), epoch=time.time_ns())
        assert isinstance(refused, ext.Err2) and refused.code == ModelError.code
        assert "outrigger split" in refused.text


@pytest.mark.parametrize(
    "changes", [{"ext_min": 2, "ext_max": 9}, {"lse_base": 2}, {"kv_type": 8}, {"split_layer": 0}]
)
def test_a_greeting_that_does_not_fit_is_refused_in_words(case, worker, changes):
    with host_end(worker.link) as end:
        refused = end.ask(hello3(case.spec, case.first, **changes), epoch=time.time_ns())
        assert isinstance(refused, ext.Err2)
        assert str(next(iter(changes.values()))) in refused.text
        with pytest.raises(EOFError):
            end.heard()


# --- what breaks the rules


def closes(sock: socket.socket) -> bytes:
    """All that comes until the worker closes."""
    sock.settimeout(30)
    heard = b""
    try:
        while data := sock.recv(65536):
            heard += data
    except ConnectionResetError:
        pass
    return heard


@pytest.mark.parametrize(
    "garbage",
    [
        b"GET / HTTP/1.1\r\n\r\n",
        os.urandom(4096),
        HEADER.pack((RESIDUAL.magic, 66, 40)) + bytes(40),
        HEADER.pack((RESIDUAL.magic, 64, 2**63)),
        HEADER.pack((RESIDUAL.magic, 4711, 0)),
        HEADER.pack((RESIDUAL.magic, 64, 200)) + bytes(200),
        HEADER.pack((0x4E544150, 1, 0)),
    ],
    ids=["http", "random", "too early", "endless", "unknown", "empty hello", "attention"],
)
def test_garbage_is_answered_with_one_error_at_most(case, worker, garbage):
    with socket.create_connection(worker.link) as sock:
        sock.sendall(garbage)
        heard = closes(sock)
    if heard:
        _, frame_type, n_bytes = HEADER.unpack(memoryview(heard))
        assert frame_type in (base.Err.TYPE, ext.Err2.TYPE)
        assert len(heard) == HEADER.size + n_bytes < 5000
    with host_end(worker.link) as end:
        end.greet(case.spec, case.first)


def test_garbage_after_the_greeting_closes_and_the_next_host_is_served(case, worker):
    with host_end(worker.link) as end:
        end.greet(case.spec, case.first)
        end.ask(chunk2(case.residual(4), 0))
        end.sock.sendall(HEADER.pack((RESIDUAL.magic, 68, 2**40)))
        assert end.heard().code == RemoteProtocolError.code
        with pytest.raises(EOFError):
            end.heard()
    with host_end(worker.link) as end:
        end.greet(case.spec, case.first)


def test_more_chunks_than_the_window_close_the_link(case, worker):
    with host_end(worker.link) as end:
        end.greet(case.spec, case.first, window=1)
        end.link.window = 16
        frames = [end.link.send(chunk2(case.residual(200), 0), time.monotonic()) for _ in range(3)]
        end.sock.sendall(b"".join(b"".join(frame) for frame in frames))
        assert b"unanswered" in closes(end.sock)


def test_half_open_connections_do_not_keep_others_out(case, worker):
    idle = [socket.create_connection(worker.link) for _ in range(5)]
    idle[0].sendall(b"SPTL")
    try:
        with host_end(worker.link) as end:
            end.greet(case.spec, case.first)
            assert end.ask(chunk2(case.residual(4), 0)).n_valid == 4
    finally:
        for sock in idle:
            sock.close()


def test_nothing_leaks(case, worker):
    """Descriptors and threads of the worker after fifty clients of all kinds are those before them."""

    def held() -> tuple[int, int]:
        process = psutil.Process(worker.process.pid)
        return process.num_fds(), process.num_threads()

    def clients(n: int) -> None:
        for _ in range(n):
            with host_end(worker.link) as end:
                end.greet(case.spec, case.first)
            with socket.create_connection(worker.link) as sock:
                sock.sendall(b"garbage" * 9)
                closes(sock)
            with socket.create_connection(worker.control) as sock:
                sock.sendall(b"mem\n")
                assert sock.recv(10)

    clients(2)
    before = held()
    clients(15)
    deadline = time.monotonic() + 20
    while any(now > then for now, then in zip(held(), before, strict=True)) and time.monotonic() < deadline:
        time.sleep(0.05)  # the last ones are still leaving
    descriptors, threads = held()
    assert descriptors <= before[0] and threads <= before[1]


# --- life


def test_it_says_what_it_serves_and_ends_when_told(cases):
    case = cases["llama"]
    with worker_process(case.tail) as worker:
        last = case.spec.n_layer_full - 1
        assert worker.ready_line.startswith(f"worker ready: layers {case.first}-{last} of llama")
        end = HostEnd(worker.link)
        end.greet(case.spec, case.first)
        worker.signal(signal.SIGTERM)
        assert worker.wait(5) == 0
        with pytest.raises((EOFError, ConnectionError)):
            end.heard()
        end.close()


@pytest.mark.model
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=["SIGTERM", "SIGINT"])
def test_it_ends_in_the_middle_of_a_chunk(smollm2, number):
    """4,096 tokens through 28 layers take many seconds; the worker leaves before they are through, unanswered."""
    spec = ModelSpec.read(smollm2)
    with worker_process(smollm2, n_ctx=4096) as worker, host_end(worker.link) as end:
        end.greet(spec, 2)
        residual = np.random.default_rng(0).standard_normal((4096, spec.n_embd), np.float32)
        end.send(chunk2(residual, 0))
        control = Line(worker.control)
        give_up_at = time.monotonic() + 60
        while control.ask("mem")["tail_state"] != "computing":
            assert time.monotonic() < give_up_at
        control.close()
        worker.signal(number)
        assert worker.wait(60) == 0
        with pytest.raises((EOFError, ConnectionError)):
            end.heard()


def test_it_serves_a_whole_model_from_any_layer(cases):
    case = cases["llama"]
    with worker_process(case.whole) as worker, host_end(worker.link) as end:
        for first in (2, 1):
            assert end.greet(case.spec, first).split_layer == 0
            span = case.engine.span(first, case.spec.n_layer_full)
            case.engine.span(0, case.spec.n_layer_full).truncate(0)
            ack = end.ask(chunk2(case.residual(9), 0, WANT_LOGITS))
            assert np.array_equal(split_output(ack)[0], span.run(case.residual(9), 0, logits="last")[0])
            end.close()
            end = HostEnd(worker.link)
        end.close()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model", "/nowhere/tail.gguf"], "/nowhere/tail.gguf"),
        ([], "--model FILE"),
        (["--model", "x", "--port", "70000"], "0 to 65535"),
    ],
)
def test_a_start_that_cannot_be_says_why(flags, words, tmp_path):
    environ = {**os.environ, "OUTRIGGER_CONFIG": ""}
    done = subprocess.run(
        [sys.executable, "-m", "device.worker", *flags],
        cwd=CHECKOUT,
        env=environ,
        capture_output=True,
        text=True,
    )
    assert done.returncode != 0
    assert words in done.stderr and "Traceback" not in done.stderr

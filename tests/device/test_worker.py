"""A running worker process, asked over its real sockets: right answers, refusals that say where the mirror stands,
and a process that outlives everything a client does to it.

The expected rows are computed here by the same engine over the whole model, so that the tail file is proven, too.
"""

from __future__ import annotations

import os
import signal
import socket
import time

import numpy as np
import pytest

from common.errors import (
    FingerprintError,
    HashMismatchError,
    ModelError,
    NonFiniteError,
    PositionError,
    RemoteProtocolError,
    WorkerBusyError,
)
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire.frames import HEADER, RESIDUAL, encode
from common.wire.layout import Payload
from common.wire.messages import ROWS_KV, ROWS_STATE, WANT_LOGITS, WANT_ROWS, WANT_STATE
from common.wire.rows import decode_rows, encode_rows

from .conftest import N_CTX
from .host_end import HostEnd, hello3, host_end
from .worker_process import worker_process

BOTH = ROWS_KV | ROWS_STATE


def chunk2(residual, position, want=0, dtype=base.DTYPE_F32) -> ext.Chunk2:
    kind = np.float32 if dtype == base.DTYPE_F32 else np.float16
    return ext.Chunk2(position, len(residual), dtype, want, Payload(np.ascontiguousarray(residual, kind)))


def as_bytes(sections):
    return [(str(s), bytes(np.ascontiguousarray(s.data))) for s in sections]


def split_output(ack):
    """(logits, sections) of an answer to a chunk."""
    output = ack.output.joined()
    logits = np.frombuffer(output[: 4 * ack.n_logits], np.float32)
    rest = output[4 * ack.n_logits :]
    return logits, decode_rows(rest) if len(rest) else []


@pytest.fixture
def host(worker):
    with host_end(worker.link) as end:
        yield end


@pytest.fixture
def greeted(case, host):
    host.greet(case.spec, case.first)
    return host


def test_the_greeting_tells_what_the_worker_is(case, host):
    answer = host.greet(case.spec, case.first, window=2)
    spec = case.spec
    assert (answer.split_layer, answer.n_layer_full, answer.n_embd) == (
        case.first,
        spec.n_layer_full,
        spec.n_embd,
    )
    assert answer.n_ctx == N_CTX and answer.text == spec.fingerprint_text(case.first)
    assert answer.features == ext.FEATURE_ROW_STATE | ext.FEATURE_SNAPSHOTS
    assert host.link.window == 2


def test_a_pipelined_read_brings_rows_and_logits_home(case, greeted):
    span = case.span
    cuts = [(0, 256), (256, 512), (512, 530)]
    residual = case.residual(530)
    for begin, end in cuts:
        greeted.send(chunk2(residual[begin:end], begin, WANT_ROWS | WANT_STATE | WANT_LOGITS))
    for begin, end in cuts:
        ack = greeted.heard()
        assert isinstance(ack, ext.Chunk2Ack), ack
        logits, sections = split_output(ack)
        assert np.array_equal(logits, span.run(residual[begin:end], begin, logits="last")[0])
        assert as_bytes(sections) == as_bytes(span.export_rows(begin, end))
        assert (ack.n_tok, ack.n_valid) == (end - begin, end)
        assert ack.compute_ms > 0 and ack.queue_ms >= 0


def test_what_is_not_wanted_does_not_come(case, greeted):
    for want, kinds in (
        (0, set()),
        (WANT_ROWS, {0, 1}),
        (WANT_STATE, {2, 3} if case.spec.cycle > 1 else set()),
    ):
        _, sections = split_output(greeted.ask(chunk2(case.residual(4), greeted_at(greeted), want)))
        assert {section.kind for section in sections} == kinds


def greeted_at(host) -> int:
    """Where the worker's mirror stands: a rewind to a far point moves nothing and says it."""
    return host.ask(ext.Trim2(N_CTX)).n_valid


def test_rows_pushed_and_pulled_are_the_same(case, greeted):
    span = case.span
    span.run(case.residual(100), 0)
    sections = span.export_rows(0, 100)
    answer = greeted.ask(ext.Sync2(BOTH, 100, encode_rows(sections)))
    assert isinstance(answer, ext.Ok2) and answer.n_valid == 100
    pulled = greeted.ask(ext.StateRange2(0, 100, BOTH))
    assert as_bytes(decode_rows(pulled.blob.joined())) == as_bytes(sections)


def test_snapshots_and_rewinds(case, greeted):
    residual = case.residual(40)
    greeted.ask(chunk2(residual[:20], 0))
    assert greeted.ask(ext.Snapshot(20)).n_valid == 20
    first = greeted.ask(chunk2(residual[20:], 20, WANT_LOGITS))
    assert greeted.ask(ext.Trim2(20)).n_valid == 20
    again = greeted.ask(chunk2(residual[20:], 20, WANT_LOGITS))
    assert first.output == again.output
    assert greeted.ask(ext.Trim2(0)).n_valid == 0


def test_refusals_say_where_the_mirror_stands(case, greeted):
    greeted.ask(chunk2(case.residual(8), 0))
    bad = case.residual(4)
    bad[2, 3] = np.inf
    for frame, code in (
        (chunk2(case.residual(4), 7), PositionError.code),
        (chunk2(bad, 8), NonFiniteError.code),
        (ext.Snapshot(3), PositionError.code),
        (ext.StateRange2(0, 99, ROWS_KV), PositionError.code),
        (ext.Sync2(BOTH, 8, Payload(b"no rows at all")), RemoteProtocolError.code),
    ):
        refused = greeted.ask(frame)
        assert isinstance(refused, ext.Err2), refused
        assert (refused.code, refused.n_valid) == (code, 8)
        assert refused.text.startswith(f"E{code} ")
    assert greeted.ask(chunk2(case.residual(4), 8)).n_valid == 12


def test_a_damaged_chunk_is_refused_and_those_behind_it_too(case, greeted):
    """Two chunks in flight, the first damaged: neither is half used, and the read can be done again."""
    residual = case.residual(32)
    good = b"".join(greeted.link.send(chunk2(residual[:16], 0), time.monotonic()))
    damaged = bytearray(good)
    damaged[-1] ^= 1
    greeted.sock.sendall(damaged)
    greeted.send(chunk2(residual[16:], 16))
    assert (first := greeted.heard()).code == HashMismatchError.code and first.n_valid == 0
    assert (second := greeted.heard()).code == PositionError.code and second.n_valid == 0
    assert greeted.ask(chunk2(residual, 0)).n_valid == 32


def test_frames_of_another_epoch_are_dropped(case, greeted):
    stale = encode(RESIDUAL, ext.Trim2(0), epoch=greeted.link.epoch - 1, seq=2)
    greeted.ask(chunk2(case.residual(4), 0))
    greeted.sock.sendall(b"".join(stale))
    assert greeted_at(greeted) == 4, "the stale TRIM2 did nothing and nothing answered it"


def test_ping(greeted):
    pong = greeted.ask(base.Ping(1000, Payload(b"x" * 100)))
    assert isinstance(pong, base.Pong) and pong.data.n_bytes == 1000


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
        assert greeted_at(second) == 0, "another host's rows are gone"
        assert second.ask(chunk2(case.residual(4), 0)).n_valid == 4
        with pytest.raises((EOFError, ConnectionError)):
            greeted.heard()  # the PING it never answered, then the end
        assert greeted_at(second) == 4, "the first one's end touches nothing of the second"


def test_a_host_that_leaves_frees_the_place_at_once(case, worker):
    for _ in range(5):
        with host_end(worker.link) as end:
            end.greet(case.spec, case.first)
            end.send(chunk2(case.residual(200), 0))  # gone before it is answered
    with host_end(worker.link) as end:
        end.greet(case.spec, case.first)
        assert greeted_at(end) == 0


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


# --- base protocol


def base_hello(case, **changes) -> base.Hello:
    spec = case.spec
    fields = dict(
        proto=2, state_format=base.STATE_FORMAT_ROWS, split_layer=case.first, n_layer_full=spec.n_layer_full,
        n_embd=spec.n_embd, n_vocab=spec.n_vocab, n_ctx=512, n_ubatch=256,
    )  # fmt: skip
    return base.Hello(**(fields | changes))


@pytest.mark.parametrize("dtype", [base.DTYPE_F32, base.DTYPE_F16])
def test_base_messages(case, host, dtype):
    ok = host.ask(base_hello(case))
    assert (ok.layer_start, ok.n_layer) == (case.first, case.spec.n_layer_full - case.first)
    kind = np.float32 if dtype == base.DTYPE_F32 else np.float16
    residual = case.residual(20).astype(kind)
    span = case.span
    ack = host.ask(base.Chunk(0, 20, dtype, WANT_LOGITS, Payload(residual)))
    expected = span.run(residual.astype(np.float32), 0, logits="last")[0]
    assert np.array_equal(np.frombuffer(ack.output.joined(), np.float32), expected)
    state = host.ask(base.State())
    assert as_bytes(decode_rows(state.blob.joined())) == as_bytes(span.export_rows(0, 20))
    assert host.ask(base.Trim(5)).n_valid == (0 if case.spec.cycle > 1 else 5)
    assert isinstance(host.ask(base.Reset()), base.ResetOk)
    assert host.ask(base.Sync(BOTH, 20, state.blob)).n_valid == 20
    assert host.ask(base.StateRange(0, 20, BOTH)).blob == state.blob
    assert isinstance(refused := host.ask(base.Chunk(3, 20, dtype, 0, Payload(residual))), base.Err)
    assert refused.text.startswith(f"E{PositionError.code} ")
    assert host.ask(base.Ping(3)).data.n_bytes == 3
    host.send(base.Bye())
    with pytest.raises(EOFError):
        host.heard()


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"state_format": 1}, "llama.cpp"), ({"proto": 3}, "proto 3"), ({"n_embd": 32}, "same model")],
)
def test_base_greetings_that_do_not_fit(case, host, changes, words):
    refused = host.ask(base_hello(case, **changes))
    assert isinstance(refused, base.Err) and words in refused.text


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
    import subprocess
    import sys

    from .worker_process import CHECKOUT

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

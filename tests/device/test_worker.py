"""A running worker process, asked over its real sockets: right answers, and refusals that say where the mirror stands.

The expected rows are computed here by the same engine over the whole model, so that the tail file is proven, too.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from common.errors import (
    HashMismatchError,
    NonFiniteError,
    PositionError,
    RemoteProtocolError,
    SettingError,
)
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire.frames import RESIDUAL, encode
from common.wire.layout import Payload
from common.wire.messages import ROWS_KV, ROWS_STATE, WANT_LOGITS, WANT_ROWS, WANT_STATE
from common.wire.rows import decode_rows, encode_rows
from device.worker import check_address

from .conftest import N_CTX
from .host_end import chunk2, host_end, mirror_at, split_output

BOTH = ROWS_KV | ROWS_STATE


def as_bytes(sections):
    return [(str(s), bytes(np.ascontiguousarray(s.data))) for s in sections]


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
        _, sections = split_output(greeted.ask(chunk2(case.residual(4), mirror_at(greeted), want)))
        assert {section.kind for section in sections} == kinds


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
    assert mirror_at(greeted) == 4, "the stale TRIM2 did nothing and nothing answered it"


def test_ping(greeted):
    pong = greeted.ask(base.Ping(1000, Payload(b"x" * 100)))
    assert isinstance(pong, base.Pong) and pong.data.n_bytes == 1000


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


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "some.host", ""])
def test_a_worker_never_listens_where_strangers_are(host):
    with pytest.raises(SettingError, match=r"OUTRIGGER_LISTEN_HOST.*loopback or of a cable"):
        check_address(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "169.254.1.2", "fe80::1%en5"])
def test_a_worker_listens_here_and_at_a_cable(host):
    check_address(host)

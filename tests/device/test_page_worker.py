"""Aim: a running worker holds pages for hosts and answers for them, whatever happens on the way.

Method: real worker processes and real sockets; answers are compared with the formula in float64. Ours and base hosts,
damage, cuts, two hosts at once, a worker that runs out of memory, one that serves a tail beside it.
"""

from __future__ import annotations

import json
import signal
import socket
import threading
import time

import numpy as np
import pytest

from common.attention.reference import softmax_attention
from common.errors import (
    EngineError,
    HashMismatchError,
    LocalProtocolError,
    ModelError,
    NonFiniteError,
    OutOfMemoryError,
    PositionError,
    WorkerBusyError,
)
from common.wire import attention_base_frames as base
from common.wire import attention_extension_frames as ext
from common.wire.extension_frames import Trim2
from common.wire.frames import ATTENTION, HEADER, encode
from common.wire.layout import Payload

from .host_end import chunk2, host_end
from .page_end import PageEnd, Pages, base_query, hello3
from .worker_process import worker_process

TOLERANCE = 4e-3
BASE_TOLERANCE = 6e-3
"""The result is rounded to f16, too."""
PAGES = Pages()
ALL = range(PAGES.n_pages // PAGES.group_pages)


@pytest.fixture(scope="module")
def worker(tmp_path_factory):
    with worker_process(None, "--pages-only", folder=tmp_path_factory.mktemp("pages")) as process:
        yield process


@pytest.fixture
def end(worker):
    with PageEnd(worker.pages) as end:
        yield end


def mem(worker) -> dict:
    with socket.create_connection(worker.control) as sock:
        sock.sendall(b"mem\n")
        return json.loads(sock.makefile().readline())


def check(parts, pages: Pages, layer: int, groups: range, n_tokens: int = 1) -> None:
    (part,) = parts
    keys = slice(
        groups.start * pages.group_pages * pages.page_tokens,
        groups.stop * pages.group_pages * pages.page_tokens,
    )
    k, v = (rows[keys] for rows in pages.rows(layer))
    o_right, lse_right = softmax_attention(pages.queries(n_tokens), k, v, pages.scale)
    o, lse = part.normalised()
    assert np.abs(o - o_right).max() < TOLERANCE and np.abs(lse - lse_right).max() < TOLERANCE


def refused(answer, error) -> str:
    assert isinstance(answer, ext.Err2) and answer.code == error.code, answer
    return answer.text


def test_pages_are_pushed_and_asked(worker, end):
    hello = end.greet()
    assert hello.features & 4 and hello.kv_type == ext.KV_TYPE_F16
    granted = end.ask(PAGES.config2(bytes_wanted=1 << 30))
    assert granted.tokens_max >= PAGES.n_pages * PAGES.page_tokens and granted.n_keys == 0
    end.push(PAGES)
    for n_tokens in (1, 4):
        for layer in PAGES.layers:
            check(end.attend(PAGES, layer, ALL, n_tokens), PAGES, layer, ALL, n_tokens)
            check(end.attend(PAGES, layer, range(1, 2), n_tokens), PAGES, layer, range(1, 2), n_tokens)
    assert len(end.attend(PAGES, PAGES.layers[0], ALL, per_group=1)) == len(ALL)
    told = mem(worker)
    assert told["pa_held"] == PAGES.n_pages * PAGES.page_tokens and told["pa_calls"] >= 9
    assert told["pa_port"] == worker.pages[1]
    assert told["state"] == "serving" and told["tail_chunks"] == 0
    image = end.ask(ext.Fetch2(PAGES.layers[1], 3))
    assert bytes(image.data.joined()) == PAGES.image(PAGES.layers[1], 3)
    assert end.ask(ext.Truncate2(200)).n_now == 192
    assert end.ask(base.Ping(5)).data.n_bytes == 5


def test_a_query_over_no_groups_is_answered_by_the_identity(end):
    """Before and after pages came; a part for each of no groups may not be asked for."""
    end.greet()
    end.ask(PAGES.config2(bytes_wanted=1 << 30))
    for _ in range(2):
        (part,) = end.attend(PAGES, PAGES.layers[0], range(0), 1, per_group=0)
        assert np.isneginf(part.m).all() and not part.l.any() and not part.o.any()
        end.push(PAGES)
    with pytest.raises(LocalProtocolError, match="group_first"):
        end.attend(PAGES, PAGES.layers[0], range(0), 1, per_group=1)


def test_queries_go_between_the_pieces_of_a_page(end):
    end.greet()
    end.ask(PAGES.config2())
    end.push(PAGES, n_pages=4)
    layer = PAGES.layers[0]
    pieces = PAGES.appends(layer, 4, 4000)
    for piece in pieces[:3]:
        end.send(piece)
    end.send(PAGES.query(layer, range(2)))
    assert [type(end.heard()) for _ in range(4)] == [ext.Ok2, ext.Ok2, ext.Ok2, ext.Attn2Ok]
    for piece in pieces[3:]:
        answer = end.ask(piece)
    assert answer.n_now == 5 * PAGES.page_tokens


def test_what_is_wrong_is_refused_and_the_connection_goes_on(end):
    end.greet()
    layer = PAGES.layers[0]
    refused(end.ask(PAGES.config2(kv_type=8)), ModelError)
    refused(end.ask(PAGES.config2(head_dim_v=64)), ModelError)
    end.ask(PAGES.config2())
    end.push(PAGES, n_pages=2)
    refused(end.ask(PAGES.query(layer, range(1, 2))), PositionError)
    refused(end.ask(PAGES.query(5, range(1))), EngineError)
    q = PAGES.queries(1)
    q[1, 1, 1] = np.nan
    refused(end.ask(PAGES.query(layer, range(1), q=Payload(q))), NonFiniteError)
    (whole,) = PAGES.appends(layer, 2)
    wrong = ext.Append2(layer, 2, whole.n, 0, whole.image_xxh3 ^ 1, whole.piece)
    refused(end.ask(wrong), HashMismatchError)
    refused(end.ask(PAGES.appends(layer, 4)[0]), PositionError)
    assert end.ask(whole).n_now == 3 * PAGES.page_tokens
    check(end.attend(PAGES, layer, range(1)), PAGES, layer, range(1))


def test_a_frame_damaged_on_the_way_is_refused(end):
    end.greet()
    end.ask(PAGES.config2())
    end.push(PAGES, n_pages=2)
    buffers = b"".join(end.link.send(PAGES.query(PAGES.layers[0], range(1)), time.monotonic()))
    damaged = bytearray(buffers)
    damaged[-3] ^= 16
    end.sock.sendall(damaged)
    refused(end.heard(), HashMismatchError)
    check(end.attend(PAGES, PAGES.layers[0], range(1)), PAGES, PAGES.layers[0], range(1))


def test_another_epoch_is_dropped_unseen(end):
    end.greet(epoch=1 << 60)
    end.ask(PAGES.config2())
    stale = encode(ATTENTION, ext.Truncate2(0), epoch=(1 << 60) - 1, seq=3)
    end.sock.sendall(b"".join(stale))
    end.push(PAGES, n_pages=1)  # numbers go on as if nothing had come


def test_a_session_outlives_its_connection(worker, end):
    end.greet()
    end.ask(PAGES.config2(session=77, keep=1))
    end.push(PAGES, n_pages=4)
    end.sock.close()
    with PageEnd(worker.pages) as again:
        again.greet()
        assert again.ask(PAGES.config2(session=77, keep=1)).n_keys == 4 * PAGES.page_tokens
        check(again.attend(PAGES, PAGES.layers[0], range(2)), PAGES, PAGES.layers[0], range(2))
        assert again.ask(PAGES.config2(session=78, keep=1)).n_keys == 0


def test_a_second_host_is_refused_while_the_first_speaks(worker, end):
    end.greet()
    with PageEnd(worker.pages) as second:
        refused(second.ask(hello3(), epoch=time.time_ns()), WorkerBusyError)
    assert end.ask(base.Ping(1)).data.n_bytes == 1


def test_garbage_ends_only_its_own_connection(worker, end):
    with socket.create_connection(worker.pages) as sock:
        sock.sendall(HEADER.pack((ATTENTION.magic, 68, 1 << 40)) + b"x" * 50)
        sock.settimeout(20)
        while sock.recv(4096):
            pass
    end.greet()
    assert end.ask(PAGES.config2()).tokens_max > 0


def test_the_budget_is_kept(tmp_path):
    pages = Pages(n_head_kv=4, head_dim=256, page_tokens=256, group_pages=1, n_pages=3, layers=(0,))
    with (
        worker_process(None, "--pages-only", "--hold-mib", "3", folder=tmp_path) as worker,
        PageEnd(worker.pages) as end,
    ):
        end.greet()
        granted = end.ask(pages.config2())
        assert granted.bytes_granted <= 3 << 20 and granted.tokens_max == 2 * pages.page_tokens
        end.push(pages, n_pages=2, piece_bytes=1 << 20)
        text = refused(end.ask(pages.appends(0, 2)[0]), OutOfMemoryError)
        assert "out of memory at 512 keys" in text
        check(end.attend(pages, 0, range(2)), pages, 0, range(2))


def test_base_hosts_have_their_own_words(worker, end):
    n, n_head, n_layer = 4096 + 130, 2, 2
    hello = end.ask(base.Hello())
    assert hello.version == base.VERSION
    head_bytes = 2 * base.HEAD_DIM
    assert end.ask(
        base.Config(n_layer, n_head, n_head * head_bytes, head_bytes, base.KV_Q8_0)
    ).text.startswith("E300")
    assert isinstance(
        end.ask(base.Config(n_layer, n_head, n_head * head_bytes, head_bytes, base.KV_F16)), base.Ok
    )
    rng = np.random.default_rng(4)
    k, v = rng.standard_normal((2, n, n_head, base.HEAD_DIM), np.float32).astype(np.float16)
    q = rng.standard_normal((2, n_head, base.QUERY_ROWS, base.HEAD_DIM), np.float32).astype(np.float16)
    empty = end.ask(base_query(q[:1]))
    assert isinstance(empty, base.AttnOk), empty
    assert empty.nk == 0 and np.isneginf(np.frombuffer(empty.output.joined()[-4 * 96 :], np.float32)).all()
    at = 0
    for size in (1, 63, 4000, n - 4064):
        rows = Payload(k[at : at + size], v[at : at + size])
        answer = end.ask(base.Append(1, at, size, rows))
        at += size
        assert int.from_bytes(answer.data.joined(), "little") == at
    assert end.ask(base.Append(1, at + 1, 1, Payload(k[:1], v[:1]))).text.startswith("E410")
    assert bytes(end.ask(base.Fetch(1, 4000, 200, 1)).data.joined()) == v[4000:4200].tobytes()
    block = base.BLOCK_BYTES_Q * n_head
    for blocks, n_keys in ((q[:1], 0), (q, 0), (q, 4096), (q[:1], 64)):
        answer = end.ask(base_query(blocks, 1, n_keys))
        assert answer.nk == (n_keys or n)
        output = answer.output.joined()
        one = len(output) // len(blocks)
        for number, queries in enumerate(blocks):
            o = np.frombuffer(output[number * one : number * one + block], np.float16).reshape(queries.shape)
            lse = np.frombuffer(output[number * one + block : (number + 1) * one], np.float32).reshape(
                n_head, -1
            )
            some = slice(number, None, 13)  # of the rows: the oracle is slow
            o_right, lse_right = softmax_attention(queries[:, some], k[: answer.nk], v[: answer.nk], 1 / 16)
            assert np.abs(o[:, some] - o_right).max() < BASE_TOLERANCE
            assert np.abs(lse[:, some] - lse_right).max() < TOLERANCE
    assert isinstance(end.ask(base.Truncate(100)), base.Ok)
    assert end.ask(base_query(q[:1], 1)).nk == 100
    assert "queries" in bytes(end.ask(base.Stats()).data.joined()).decode()


def test_pages_and_the_tail_do_not_disturb_each_other(cases, tmp_path):
    """Chunks and queries at the same time, on both channels: every answer is what it is alone."""
    case = cases["llama"]
    with worker_process(case.tail, folder=tmp_path) as worker:
        assert ", pages " in worker.ready_line
        residual, wrong = case.residual(256), []
        right = case.span.run(residual, 0, logits="last")

        def read() -> None:
            with host_end(worker.link) as host:
                host.greet(case.spec, case.first)
                for _ in range(6):
                    answer = host.ask(chunk2(residual, 0, want=1))
                    logits = np.frombuffer(answer.output.joined(), np.float32)
                    wrong.append(not np.array_equal(logits, right.reshape(-1)))
                    host.ask(Trim2(0))

        reader = threading.Thread(target=read)
        with PageEnd(worker.pages) as end:
            end.greet()
            end.ask(PAGES.config2())
            end.push(PAGES)
            first = end.attend(PAGES, PAGES.layers[0], ALL, 4)
            reader.start()
            while reader.is_alive():
                (part,) = end.attend(PAGES, PAGES.layers[0], ALL, 4)
                assert np.array_equal(part.o, first[0].o) and np.array_equal(part.l, first[0].l)
        reader.join()
        assert wrong == [False] * 6


# --- an emulated device


def emulated(tmp_path, faults: str, *flags: str):
    return worker_process(None, "--pages-only", "--faults", faults, *flags, folder=tmp_path)


def test_a_cut_in_a_query_ends_the_connection_and_the_session_goes_on(tmp_path):
    with emulated(tmp_path, "cut in query 2") as worker:
        with PageEnd(worker.pages) as end:
            end.greet()
            end.ask(PAGES.config2(session=9, keep=1))
            end.push(PAGES)
            end.attend(PAGES, PAGES.layers[0], ALL)
            with pytest.raises((EOFError, ConnectionError)):
                end.attend(PAGES, PAGES.layers[0], ALL)
        with PageEnd(worker.pages) as again:
            again.greet()
            assert again.ask(PAGES.config2(session=9, keep=1)).n_keys == PAGES.n_pages * PAGES.page_tokens
            check(again.attend(PAGES, PAGES.layers[0], ALL), PAGES, PAGES.layers[0], ALL)


def test_flipped_bits_are_noticed_on_both_ways(tmp_path):
    with (
        emulated(tmp_path, "flip in append 2; flip answering query 1") as worker,
        PageEnd(worker.pages) as end,
    ):
        end.greet()
        end.ask(PAGES.config2())
        pieces = PAGES.appends(PAGES.layers[0], 0, 8000)
        assert isinstance(end.ask(pieces[0]), ext.Ok2)
        refused(end.ask(pieces[1]), HashMismatchError)
        end.push(PAGES)
        with pytest.raises(HashMismatchError):
            end.attend(PAGES, PAGES.layers[0], ALL)


def test_a_restarted_device_holds_nothing(tmp_path):
    with emulated(tmp_path, "restart 0 after append 30; out-of-memory before append 35") as worker:
        with PageEnd(worker.pages) as end:
            boot_id = end.greet().boot_id
            end.ask(PAGES.config2(session=3, keep=1))
            with pytest.raises((EOFError, ConnectionError)):
                end.push(PAGES, piece_bytes=2000)
        with PageEnd(worker.pages) as end:
            assert end.greet().boot_id != boot_id
            assert end.ask(PAGES.config2(session=3, keep=1)).n_keys == 0
            pieces = iter(PAGES.appends(PAGES.layers[0], 0, 2000))
            answer = end.ask(next(pieces))
            while isinstance(answer, ext.Ok2):
                answer = end.ask(next(pieces))
            refused(answer, OutOfMemoryError)


def test_a_slow_link_changes_no_answer(tmp_path):
    flags = "--pages-only", "--emulate", "usb2,rate=20MB/s"
    with worker_process(None, *flags, folder=tmp_path) as worker, PageEnd(worker.pages) as end:
        end.greet()
        end.ask(PAGES.config2())
        end.push(PAGES, n_pages=2, piece_bytes=1 << 20)
        check(end.attend(PAGES, PAGES.layers[0], range(1)), PAGES, PAGES.layers[0], range(1))


def test_it_ends_when_told_with_a_host_attached(tmp_path):
    with worker_process(None, "--pages-only", folder=tmp_path) as worker, PageEnd(worker.pages) as end:
        end.greet()
        end.ask(PAGES.config2())
        end.push(PAGES, n_pages=1)
        worker.signal(signal.SIGTERM)
        assert worker.wait(5) == 0
        with pytest.raises((EOFError, ConnectionError)):
            end.heard()

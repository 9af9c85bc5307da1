"""The link's grammar, from both ends at once: two Link objects hand each other frames, no socket, time as a number.

What one end may send the other accepts (a property over random conversations); everything else is refused on the side
that breaks the rule, and a refused send leaves the link as it was.
"""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import BusyError, HashMismatchError, LocalProtocolError, RemoteProtocolError
from common.limits import CHUNK_TOKENS_MAX, FRAME_BYTES_MAX
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire.deadlines import AckClock
from common.wire.fingerprint import fingerprint
from common.wire.frames import HEADER, RESIDUAL, encode
from common.wire.grammar import Phase, Role
from common.wire.layout import Payload
from common.wire.link import Arrived, Link, Refused
from common.wire.stream import RawFrame
from tests.common.wire.strategies import frames

N_EMBD = 4


def raw(buffers) -> RawFrame:
    """The frame that these buffers put on the wire."""
    data = b"".join(buffers)
    _, frame_type, n_bytes = HEADER.unpack(memoryview(data))
    assert len(data) == HEADER.size + n_bytes
    return RawFrame(frame_type, memoryview(bytearray(data[HEADER.size :])))


def hello3(**changes) -> ext.Hello3:
    fields = dict(
        ext_min=1, ext_max=1, boot_id=1, features=3, lse_base=1, kv_type=1, page_tokens=1, group_pages=1,
        frame_mib_max=256, window=2, split_layer=2, n_layer_full=4, n_embd=N_EMBD, n_vocab=8, n_ctx=512,
        device="", fingerprint=fingerprint("x"), text="x",
    )  # fmt: skip
    return ext.Hello3(**(fields | changes))


def hello3_ok(**changes) -> ext.Hello3Ok:
    return ext.Hello3Ok(**(vars(hello3()) | changes))


def chunk2(position=0, n_tokens=1, n_embd=N_EMBD) -> ext.Chunk2:
    return ext.Chunk2(position, n_tokens, 0, 0, Payload(bytes(4 * n_tokens * n_embd)))


class Pair:
    """A host's and a worker's link, joined."""

    def __init__(self, **options):
        self.host = Link(Role.HOST, **options)
        self.worker = Link(Role.WORKER, **options)

    def say(self, who, frame, now=0.0, **options):
        other = self.worker if who is self.host else self.host
        return other.receive(raw(who.send(frame, now, **options)), now)

    def greet(self, **changes):
        self.say(self.host, hello3(**changes), epoch=5)
        self.say(self.worker, hello3_ok(**changes))
        return self


def ack(seq, n_tokens=1, compute_ms=1.0) -> ext.Chunk2Ack:
    return ext.Chunk2Ack(seq, n_tokens, n_tokens, 0, compute_ms, 0.0)


def test_a_read_in_short():
    pair = Pair().greet()
    assert pair.host.phase is pair.worker.phase is Phase.EXTENDED
    assert pair.host.epoch == pair.worker.epoch == 5
    first = pair.say(pair.host, chunk2(0), tag="first")
    second = pair.say(pair.host, chunk2(1), tag="second")
    assert (first.seq, second.seq) == (2, 3)
    answer = pair.say(pair.worker, ack(first.seq))
    assert answer.request.tag == "first"
    assert not pair.host.idle
    assert pair.say(pair.worker, ack(second.seq)).request.tag == "second"
    assert pair.host.idle and pair.worker.idle


def test_the_window_is_the_smaller_of_both_and_holds_on_both_ends():
    pair = Pair()
    pair.say(pair.host, hello3(window=3), epoch=5)
    pair.say(pair.worker, hello3_ok(window=2))
    for position in range(2):
        pair.say(pair.host, chunk2(position))
    assert not pair.host.room(ext.Chunk2)
    with pytest.raises(LocalProtocolError, match="2 requests are unanswered"):
        pair.host.send(chunk2(2), 0.0)
    pair.host.window = 16  # a host that does not keep to it
    with pytest.raises(RemoteProtocolError, match="2 requests are unanswered"):
        pair.say(pair.host, chunk2(2))


def test_a_trim_may_follow_unanswered_chunks_also_a_full_window_and_is_answered_in_its_turn():
    pair = Pair().greet()
    chunks = [pair.say(pair.host, chunk2(position)) for position in range(2)]
    assert not pair.host.room(ext.Chunk2) and pair.host.room(ext.Trim2)
    trim = pair.say(pair.host, ext.Trim2(0))
    assert not any(pair.host.room(request) for request in (ext.Chunk2, ext.Trim2, ext.Snapshot))
    assert pair.say(pair.worker, ack(chunks[0].seq)).request.request is ext.Chunk2
    assert pair.say(pair.worker, ext.Err2.of(chunks[1].seq, 601, 1, "unwanted")).request.request is ext.Chunk2
    assert pair.say(pair.worker, ext.Ok2(trim.seq, 0)).request.request is ext.Trim2
    assert pair.host.idle and pair.worker.idle


@pytest.mark.parametrize(
    "request_frame", [ext.Sync2(1, 0, Payload(b"")), ext.Snapshot(0), ext.StateRange2(0, 0, 1)]
)
def test_other_requests_wait_for_their_turn(request_frame):
    pair = Pair().greet()
    pair.say(pair.host, chunk2())
    with pytest.raises(LocalProtocolError):
        pair.host.send(request_frame, 0.0)
    with pytest.raises(LocalProtocolError, match="PING while"):
        pair.host.send(base.Ping(0), 0.0)
    pair.say(pair.worker, ack(2))
    assert pair.say(pair.host, request_frame).seq == 3


def test_ping_goes_either_way_when_idle():
    pair = Pair().greet()
    for asker, other in ((pair.host, pair.worker), (pair.worker, pair.host)):
        pair.say(asker, base.Ping(3, Payload(b"abc")))
        pair.say(other, base.Pong(Payload(b"abc")))
        with pytest.raises(LocalProtocolError, match="PONG without PING"):
            other.send(base.Pong(), 0.0)
    with pytest.raises(RemoteProtocolError, match="PONG without PING"):
        pair.worker.receive(raw(encode(RESIDUAL, base.Pong())), 0.0)


def test_answers_must_answer():
    for wrong, complaint in (
        (ext.Ok2(2, 0), "does not answer CHUNK2"),
        (ack(7), "frame 2 is next"),
        (ack(2, n_tokens=2), "speaks of 2 tokens"),
    ):
        pair = Pair().greet()
        pair.say(pair.host, chunk2())
        with pytest.raises(LocalProtocolError, match=complaint):
            pair.worker.send(wrong, 0.0)
        pair.worker.pending[0] = dataclasses.replace(
            pair.worker.pending[0], seq=getattr(wrong, "answers", 0), n_tokens=getattr(wrong, "n_tok", 1),
            request=ext.Trim2 if isinstance(wrong, ext.Ok2) else ext.Chunk2,
        )  # fmt: skip
        with pytest.raises(RemoteProtocolError, match=complaint):
            pair.say(pair.worker, wrong)


def test_err2_answers_one_request_or_the_connection():
    pair = Pair().greet()
    pair.say(pair.host, chunk2(), tag="mine")
    refused = pair.say(pair.worker, ext.Err2.of(2, 410, 0, "no"))
    assert refused.request.tag == "mine" and refused.frame.text == "E410 no"
    assert pair.host.idle
    buffers = pair.worker.farewell(BusyError("full"))
    last = pair.host.receive(raw(buffers), 0.0)
    assert last.request is None and last.frame.code == BusyError.code
    assert pair.worker.phase is Phase.CLOSED


def test_a_stale_epoch_is_dropped_and_counted():
    pair = Pair().greet()
    old = raw(pair.host.send(chunk2(), 0.0))
    pair.worker.epoch += 1
    assert pair.worker.receive(old, 0.0) is None
    assert pair.worker.counts["stale_epoch"] == 1
    assert pair.worker.idle


@pytest.mark.parametrize("at", [0, 8, 16, 24, 40, 55])
def test_a_damaged_request_is_refused_and_the_next_one_served(at):
    pair = Pair().greet()
    damaged = raw(pair.host.send(chunk2(), 0.0, tag="damaged"))
    damaged.payload[at] ^= 1
    refused = pair.worker.receive(damaged, 0.0)
    assert isinstance(refused, Refused) and isinstance(refused.error, HashMismatchError)
    assert pair.worker.counts["bad_hash"] == 1
    heard = pair.say(pair.worker, ext.Err2.of(refused.seq, refused.error.code, 0, "hash"))
    assert heard.request.tag == "damaged"
    assert isinstance(pair.say(pair.host, chunk2()), Arrived)


def test_a_damaged_answer_or_greeting_ends_the_link():
    pair = Pair().greet()
    pair.say(pair.host, chunk2())
    answer = raw(pair.worker.send(ack(2), 0.0))
    answer.payload[-1] ^= 1
    with pytest.raises(HashMismatchError):
        pair.host.receive(answer, 0.0)
    pair = Pair()
    greeting = raw(pair.host.send(hello3(), 0.0, epoch=5))
    greeting.payload[-1] ^= 1
    with pytest.raises(HashMismatchError):
        pair.worker.receive(greeting, 0.0)
    complaint = pair.host.receive(raw(pair.worker.farewell(HashMismatchError("x"))), 0.0)
    assert isinstance(complaint.frame, ext.Err2), "a host that greeted with HELLO3 hears ERR2"


@pytest.mark.parametrize("seen", [0, 7])
def test_a_gap_or_a_repetition_ends_the_link(seen):
    pair = Pair().greet()
    pair.worker._seq_seen = seen
    with pytest.raises(RemoteProtocolError, match="gap"):
        pair.say(pair.host, chunk2())


def test_a_chunk_of_the_wrong_width_is_refused_on_both_ends():
    pair = Pair().greet()
    with pytest.raises(LocalProtocolError, match="1 tokens have 16"):
        pair.host.send(chunk2(n_embd=3), 0.0)
    pair.host.n_embd = 3
    with pytest.raises(RemoteProtocolError, match="1 tokens have 16"):
        pair.say(pair.host, chunk2(n_embd=3))


def test_bounds_before_anything_is_allocated():
    pair = Pair()
    with pytest.raises(RemoteProtocolError, match="may not come while the link is open"):
        pair.worker.bytes_max(ext.Chunk2.TYPE)
    assert pair.worker.bytes_max(ext.Hello3.TYPE) < 300_000
    with pytest.raises(RemoteProtocolError, match="unknown"):
        pair.worker.bytes_max(4711)
    pair.greet()
    assert pair.worker.bytes_max(ext.Chunk2.TYPE) == 40 + CHUNK_TOKENS_MAX * N_EMBD * 4
    assert pair.worker.bytes_max(ext.Sync2.TYPE) == FRAME_BYTES_MAX
    with pytest.raises(RemoteProtocolError):
        pair.host.bytes_max(ext.Chunk2.TYPE)


def test_a_frame_longer_than_the_peer_takes_is_not_sent():
    pair = Pair().greet(frame_mib_max=1)
    long = ext.Sync2(1, 0, Payload(bytes(1 << 20)))
    with pytest.raises(LocalProtocolError, match="the peer takes 1048576"):
        pair.host.send(long, 0.0)
    assert pair.host.idle


def test_base_conversation():
    pair = Pair()
    hello = base.Hello(2, base.STATE_FORMAT_ROWS, 2, 4, N_EMBD, 8, 512, 256)
    pair.say(pair.host, hello)
    ok = base.HelloOk(2, base.STATE_FORMAT_ROWS, 2, 4, 2, N_EMBD, 8, 512, 0, "x")
    pair.say(pair.worker, ok)
    assert pair.host.phase is Phase.BASE
    chunk = base.Chunk(0, 1, 1, 0, Payload(bytes(2 * N_EMBD)))
    pair.say(pair.host, chunk, tag=1)
    pair.say(pair.host, chunk, tag=2)
    assert pair.say(pair.worker, base.ChunkAck(0, 1, 0, 1.0)).request.tag == 1
    assert pair.say(pair.worker, base.Err("E400 no")).request.tag == 2
    pair.say(pair.host, base.Bye())
    assert pair.host.phase is pair.worker.phase is Phase.CLOSED


def test_deadlines_follow_what_was_measured():
    clock = AckClock(first_s=60.0, floor_s=1.0, factor=8.0, bytes_per_s=1e9)
    pair = Pair(clock=clock)
    pair.greet()
    pair.say(pair.host, chunk2(), now=100.0)
    assert pair.host.due_at() == pytest.approx(160.0, abs=0.01)
    pair.say(pair.worker, ack(2, compute_ms=500.0), now=101.0)
    pair.say(pair.host, chunk2(), now=102.0)
    assert pair.host.due_at() == pytest.approx(106.0, abs=0.01)
    pair.say(pair.host, chunk2(), now=102.0)
    assert pair.host.pending[-1].due_at == pytest.approx(110.0, abs=0.01)
    pair.say(pair.worker, ack(3), now=103.0)
    assert pair.host.due_at() == pytest.approx(110.0, abs=0.01)


said = st.tuples(st.booleans(), frames())


@settings(max_examples=200)
@given(st.lists(said, max_size=30), st.booleans())
def test_what_one_end_may_send_the_other_accepts(conversation, greeted):
    """Two honest ends never refuse each other; a refused send changes nothing."""
    pair = Pair()
    if greeted:
        pair.greet()
    for host_speaks, frame in conversation:
        who = pair.host if host_speaks else pair.worker
        before = (who.phase, len(who.pending), who._seq_sent)
        try:
            event = pair.say(who, frame, epoch=9 if isinstance(frame, ext.Hello3) else 0)
        except LocalProtocolError:
            assert (who.phase, len(who.pending), who._seq_sent) == before
        else:
            assert event.frame == frame
        assert pair.host.phase is pair.worker.phase
        assert len(pair.host.pending) == len(pair.worker.pending)


@settings(max_examples=200)
@given(st.sampled_from(sorted(RESIDUAL.frames)), st.binary(max_size=120), st.booleans(), st.booleans())
def test_garbage_in_a_frame_ends_the_link_and_nothing_else(frame_type, payload, greeted, to_host):
    pair = Pair()
    if greeted:
        pair.greet()
    link = pair.host if to_host else pair.worker
    try:
        event = link.receive(RawFrame(frame_type, memoryview(payload)), 0.0)
    except RemoteProtocolError as error:
        assert len(str(error)) < 400
    else:
        assert event is None or isinstance(event, Arrived | Refused)

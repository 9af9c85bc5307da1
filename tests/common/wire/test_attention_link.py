"""Aim: both ends of the attention channel agree on who may say what, and sizes follow from what was configured.

Method: two AttentionLink objects hand each other frames, as in test_link.py; a property over random conversations.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import LocalProtocolError, RemoteProtocolError
from common.limits import QUERY_TOKENS_MAX
from common.wire import attention_base_frames as base
from common.wire import attention_extension_frames as ext
from common.wire.attention_link import AttentionLink
from common.wire.fingerprint import fingerprint
from common.wire.frames import HEADER
from common.wire.grammar import Phase, Role
from common.wire.layout import Payload
from common.wire.link import Refused
from common.wire.stream import RawFrame
from tests.common.wire.attention_strategies import attention_frames

N_HEAD_KV, N_GROUP, HEAD_DIM = 2, 3, 8


def raw(buffers) -> RawFrame:
    data = b"".join(buffers)
    _, frame_type, _ = HEADER.unpack(memoryview(data))
    return RawFrame(frame_type, memoryview(bytearray(data[HEADER.size :])))


def hello(cls=ext.Hello3, **changes):
    fields = dict(
        ext_min=1, ext_max=1, boot_id=1, features=4, lse_base=1, kv_type=1, page_tokens=0, group_pages=0,
        frame_mib_max=256, window=4, split_layer=0, n_layer_full=0, n_embd=0, n_vocab=0, n_ctx=0, device="",
        fingerprint=fingerprint(""), text="",
    )  # fmt: skip
    return cls(**(fields | changes))


def config2(**changes) -> ext.Config2:
    fields = dict(
        n_layer=1, n_head_kv=N_HEAD_KV, n_group=N_GROUP, head_dim_k=HEAD_DIM, head_dim_v=HEAD_DIM, kv_type=1,
        page_tokens=64, group_pages=1, many_rows=0, bytes_wanted=1 << 20, session=0, keep=0,
        layers=Payload(np.array([3], "<u4")),
    )  # fmt: skip
    return ext.Config2(**(fields | changes))


def query(n_tokens=1, n_bytes=None) -> ext.Attn2:
    n_bytes = 4 * N_HEAD_KV * N_GROUP * n_tokens * HEAD_DIM if n_bytes is None else n_bytes
    return ext.Attn2(3, n_tokens, 0, 2, 1, 0.5, 0, Payload(bytes(n_bytes)))


def answer(seq: int) -> ext.Attn2Ok:
    return ext.Attn2Ok(seq, 1, 64, 0, 10.0, 0.0, 10.0, 0.0, Payload(bytes(4)))


class Pair:
    def __init__(self):
        self.host, self.worker = AttentionLink(Role.HOST), AttentionLink(Role.WORKER)

    def say(self, who, frame, now=0.0, **options):
        other = self.worker if who is self.host else self.host
        return other.receive(raw(who.send(frame, now, **options)), now)

    def greet(self):
        self.say(self.host, hello(), epoch=5)
        self.say(self.worker, hello(ext.Hello3Ok))
        return self

    def configure(self):
        asked = self.say(self.host, config2())
        self.say(self.worker, ext.Config2Ok(asked.seq, 1 << 20, 4096, 0))
        return self


def test_pieces_and_queries_are_unanswered_beside_each_other_up_to_the_window():
    pair = Pair().greet().configure()
    piece = ext.Append2(3, 0, 64, 0, 0, Payload(b"x"))
    asked = [pair.say(pair.host, frame) for frame in (piece, query(), piece, query())]
    assert not pair.host.room(ext.Attn2) and not pair.host.room(ext.Append2)
    assert not pair.host.room(ext.Truncate2)
    pair.say(pair.worker, ext.Ok2(asked[0].seq, 0))
    assert pair.host.room(ext.Attn2)
    with pytest.raises(LocalProtocolError, match="does not answer"):
        pair.worker.send(ext.Ok2(asked[1].seq, 0), 0.0)
    heard = pair.say(pair.worker, answer(asked[1].seq))
    assert heard.request.request is ext.Attn2
    assert pair.host.clock.token_ms == 5.0, "10 ms for a token and two groups"


def test_nothing_long_is_let_in_before_pages_are_configured():
    pair = Pair().greet()
    for cls in (ext.Attn2, ext.Append2):
        assert pair.worker.bytes_max(cls.TYPE) == 24 + cls.LAYOUT.size
    with pytest.raises(LocalProtocolError, match="before CONFIG2"):
        pair.host.send(ext.Append2(3, 0, 64, 0, 0, Payload(b"")), 0.0)
    pair.configure()
    expected = 24 + 28 + 4 * N_HEAD_KV * N_GROUP * QUERY_TOKENS_MAX * HEAD_DIM
    assert pair.worker.bytes_max(ext.Attn2.TYPE) == expected
    with pytest.raises(LocalProtocolError, match="bytes of queries"):
        pair.host.send(query(n_bytes=4), 0.0)
    pair.host.shape = pair.host.shape.__class__(1, 1, 1)
    with pytest.raises(RemoteProtocolError, match="bytes of queries"):
        pair.say(pair.host, query(n_bytes=4))


def test_the_base_geometry_is_fixed():
    pair = Pair()
    pair.say(pair.host, base.Hello())
    pair.say(pair.worker, base.HelloOk(4, 0, "x"))
    pair.say(pair.host, base.Config(2, 2, 1024, 512, 0))
    pair.say(pair.worker, base.Ok())
    with pytest.raises(LocalProtocolError, match="bytes of queries"):
        pair.host.send(base.Attn(0, 1, 0, 1.0, Payload(bytes(4))), 0.0)
    pair.say(pair.host, base.AttnBig(0, 9, 0, 1.0, Payload(bytes(2 * 2 * base.BLOCK_BYTES_Q))))
    with pytest.raises(LocalProtocolError, match="unanswered"):
        pair.host.send(base.Ping(0), 0.0)


def test_a_damaged_query_is_refused_and_the_next_one_served():
    pair = Pair().greet().configure()
    damaged = raw(pair.host.send(query(), 0.0, tag="damaged"))
    damaged.payload[-1] ^= 1
    refused = pair.worker.receive(damaged, 0.0)
    assert isinstance(refused, Refused)
    heard = pair.say(pair.worker, ext.Err2.of(refused.seq, refused.error.code, 0, "hash"))
    assert heard.request.tag == "damaged"
    assert pair.say(pair.host, query()).frame.n_tok == 1


@settings(max_examples=200)
@given(st.lists(st.tuples(st.booleans(), attention_frames()), max_size=30), st.integers(0, 2))
def test_what_one_end_may_send_the_other_accepts(conversation, stage):
    """Two honest ends never refuse each other; a refused send changes nothing."""
    pair = Pair()
    if stage:
        pair.greet()
    if stage == 2:
        pair.configure()
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


def test_the_last_word_is_one_that_the_peer_understands():
    for pair, kind in ((Pair().greet(), ext.Err2), (Pair(), base.Err)):
        last = pair.host.receive(raw(pair.worker.farewell(RemoteProtocolError("x"))), 0.0)
        assert isinstance(last.frame, kind)
        assert pair.worker.phase is Phase.CLOSED

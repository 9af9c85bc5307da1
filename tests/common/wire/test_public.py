"""Aim: a public message survives its two frames; whatever else arrives is refused, or skipped where it may be newer.

Method: hypothesis makes messages of every type, and bytes of no type.
"""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import RemoteProtocolError
from common.limits import PUBLIC_BYTES_MAX
from common.wire import public as p

BODY = msgspec.Raw(msgspec.msgpack.encode({"prompt": "a"}))
ids = st.text(min_size=1, max_size=64)
counts = st.integers(1, 1 << 20)
asks = st.one_of(
    st.builds(p.Generate, id=ids, body=st.just(BODY), credit=counts, report=st.booleans()),
    st.builds(p.Grant, id=ids, credit=counts),
    st.builds(p.Cancel, id=ids),
    st.builds(p.Tokenize, id=ids, body=st.just(BODY)),
    st.builds(p.Detokenize, id=ids, body=st.just(BODY)),
    st.builds(p.Status, id=ids),
    st.builds(p.Ping, id=ids),
)
answers = st.one_of(
    st.builds(p.Queued, id=ids, ahead=counts),
    st.builds(p.PieceWritten, id=ids, text=st.text(), n_tokens=counts, token_ids=st.lists(counts).map(tuple)),
    st.builds(p.Failed, id=ids, status=counts, kind=st.text(), message=st.text(), code=st.none() | st.text()),
    st.builds(p.Pong, id=ids, ids=st.lists(ids), lease_s=st.floats(0, 9)),
    st.builds(p.Alive),
)
events = st.builds(p.RequestStarted, seq=counts, at_s=st.floats(0, 9), request_id=ids, n_prompt=counts)


@given(asks)
def test_an_ask_arrives_as_it_was_said(ask):
    frames = p.encode(ask)
    heard = p.decode_ask(frames)
    assert p.encode(heard) == frames and type(heard) is type(ask)
    assert p.id_in(frames) == ask.id
    if isinstance(ask, p.Generate | p.Tokenize | p.Detokenize):
        assert p.decode_body(heard.body) == {"prompt": "a"}


@given(answers)
def test_an_answer_arrives_as_it_was_said(answer):
    assert p.decode_answer(p.encode(answer)) == answer


@given(events)
def test_an_event_arrives_with_its_topic_in_front(event):
    topic, *_ = frames = p.encode(event)
    assert topic == b"request.started" and p.decode_event(frames) == event


@given(st.lists(st.binary(max_size=80) | st.just(p.VERSION_FRAME), max_size=4))
def test_other_frames_are_a_protocol_error_and_nothing_else(frames):
    for decode in (p.decode_ask, p.decode_answer, p.decode_event):
        try:
            decode(frames)
        except RemoteProtocolError as error:
            assert str(error)
    assert isinstance(p.id_in(frames), str)


def test_a_frame_over_the_bound_is_refused_before_it_is_read():
    with pytest.raises(RemoteProtocolError, match=f"at most {PUBLIC_BYTES_MAX}"):
        p.decode_ask([p.VERSION_FRAME, bytes(PUBLIC_BYTES_MAX + 1)])


def test_a_client_skips_types_and_keys_of_a_later_version():
    later = msgspec.msgpack.encode({"type": "moved", "id": "a"})
    assert p.decode_answer([p.VERSION_FRAME, later]) is None
    assert p.decode_event([b"moved", p.VERSION_FRAME, later]) is None
    more = msgspec.msgpack.encode({"type": "queued", "id": "a", "ahead": 1, "since_s": 2.0})
    assert p.decode_answer([p.VERSION_FRAME, more]) == p.Queued(id="a", ahead=1)
    with pytest.raises(RemoteProtocolError, match="ahead"):
        p.decode_answer([p.VERSION_FRAME, msgspec.msgpack.encode({"type": "queued", "id": "a"})])


def test_the_gateway_skips_nothing():
    more = msgspec.msgpack.encode({"type": "cancel", "id": "a", "softly": True})
    with pytest.raises(RemoteProtocolError, match="softly"):
        p.decode_ask([p.VERSION_FRAME, more])

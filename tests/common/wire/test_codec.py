"""Aim: a bus message survives encode and decode whole, and nothing else gets through.

Method: every message of every route and direction is built by hypothesis from its own type; foreign and damaged frames
are made by cutting, flipping and swapping real ones.
"""

from __future__ import annotations

import typing
from types import NoneType

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import LocalProtocolError, ProtocolError, RemoteProtocolError
from common.limits import BUS_FRAMES_MAX
from common.wire import held as h
from common.wire import messages as m
from common.wire.codec import HEADER, BusCodec, byte_view
from common.wire.routes import GENERATE, LIFE, LINK, RESIDUAL, ROUTES

U64 = st.integers(0, 2**64 - 1)
SIZES = {"n_tokens", "n_embd", "blob_bytes", "page_tokens", "key_bytes", "value_bytes"}
SIZES |= {"n_logits", "n_parts", "n_head_kv", "n_rows", "head_dim", "position"}
OTHER = {"asker": "owner", "owner": "asker"}


def values_of(hint: object, name: str) -> st.SearchStrategy:
    """A strategy for a field of type `hint`; sizes of arrays stay small."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:  # a number that is not negative
        assert [meta.ge for meta in hint.__metadata__] == [0], hint
        return st.floats(0, allow_nan=False) if args[0] is float else st.integers(0, 2**63 - 1)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return instances_of(hint)
    if origin is typing.Literal:
        return st.sampled_from(args)
    if origin is tuple and args[-1] is not Ellipsis:
        return st.tuples(*(values_of(arg, name) for arg in args))
    if origin is tuple:
        return st.lists(values_of(args[0], name), max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(values_of(args[0], name), values_of(args[1], name), max_size=3)
    if NoneType in args:
        return st.none() | st.one_of(*(values_of(arg, name) for arg in args if arg is not NoneType))
    if hint is int:
        return st.integers(0, 9) if name in SIZES else st.integers(-(2**63), 2**63 - 1)
    if hint is float:
        return st.floats(allow_nan=False)
    return {str: st.text(max_size=20), bool: st.booleans(), bytes: st.binary(max_size=20)}[hint]


def instances_of(struct: type[msgspec.Struct]) -> st.SearchStrategy:
    hints = typing.get_type_hints(struct, include_extras=True)
    return st.builds(struct, **{name: values_of(hints[name], name) for name in struct.__struct_fields__})


def members(union: object) -> tuple[type[m.Message], ...]:
    return typing.get_args(union) or (union,)


SAYABLE = [
    (route, side, struct)
    for route in ROUTES.values()
    for side, union in (("asker", route.ask), ("owner", route.answer))
    for struct in members(union)
]


@st.composite
def spoken(draw: st.DrawFn):
    """(route, side, message, its arrays) of something that may be said."""
    route, side, struct = draw(st.sampled_from(SAYABLE))
    message = draw(instances_of(struct))
    arrays = [draw(st.binary(min_size=n, max_size=n)) for n in message.frame_bytes]
    return route, side, message, arrays


@given(spoken(), U64, U64)
def test_every_message_survives_the_round_trip(said, epoch, seq):
    route, side, message, arrays = said
    frames = BusCodec(route, side).encode(message, arrays, epoch=epoch, seq=seq)
    envelope = BusCodec(route, OTHER[side]).decode([bytes(frame) for frame in frames])
    assert envelope.message == message
    assert type(envelope.message) is type(message)
    assert (envelope.epoch, envelope.seq) == (epoch, seq)
    assert [bytes(array) for array in envelope.arrays] == arrays


def test_every_declared_message_is_said_on_some_route():
    named = [*vars(m).values(), *vars(h).values()]
    declared = {value for value in named if isinstance(value, type) and issubclass(value, m.Message)}
    declared.remove(m.Message)
    assert {struct for _, _, struct in SAYABLE} == declared


@given(spoken(), spoken())
def test_what_the_route_does_not_allow_is_refused_at_both_ends(said, other):
    route, side, message, arrays = said
    other_route, other_side, _, _ = other
    allowed = members(other_route.ask if other_side == "asker" else other_route.answer)
    codec = BusCodec(other_route, other_side)
    if type(message) not in allowed:
        with pytest.raises(LocalProtocolError, match=type(message).__name__):
            codec.encode(message, arrays, epoch=1, seq=1)
    # The header names the route, so a message of another route never reaches the body's decoder.
    frames = BusCodec(route, side).encode(message, arrays, epoch=1, seq=1)
    if other_route is not route:
        with pytest.raises(RemoteProtocolError, match="route"):
            BusCodec(other_route, OTHER[other_side]).decode(frames)
    elif type(message) not in allowed:
        with pytest.raises(RemoteProtocolError):
            BusCodec(other_route, OTHER[other_side]).decode(frames)


@given(spoken(), st.data())
def test_wrong_frame_lengths_are_refused(said, data):
    route, side, message, arrays = said
    frames = [bytes(frame) for frame in BusCodec(route, side).encode(message, arrays, epoch=1, seq=1)]
    change = data.draw(st.sampled_from(["add", "drop", "longer", "shorter"] if arrays else ["add"]))
    damaged = {
        "add": [*frames, b""],
        "drop": frames[:-1],
        "longer": [*frames[:-1], frames[-1] + b"x"],
        "shorter": [*frames[:-1], frames[-1][:-1]],
    }[change]
    if damaged == frames:
        return
    with pytest.raises(RemoteProtocolError, match=f"{type(message).__name__} says its arrays"):
        BusCodec(route, OTHER[side]).decode(damaged)
    with pytest.raises(LocalProtocolError, match="arrays have"):
        BusCodec(route, side).encode(message, damaged[2:], epoch=1, seq=1)


@given(st.lists(st.binary(max_size=60), max_size=BUS_FRAMES_MAX + 4), st.sampled_from(list(ROUTES.values())))
def test_foreign_bytes_are_refused(frames, route):
    with pytest.raises(RemoteProtocolError):
        BusCodec(route, "owner").decode(frames)


@given(spoken(), st.binary(max_size=200))
def test_a_foreign_body_is_refused_or_is_a_message_of_the_route(said, body):
    route, side, message, arrays = said
    header = bytes(BusCodec(route, side).encode(message, arrays, epoch=1, seq=1)[0])
    try:
        envelope = BusCodec(route, OTHER[side]).decode([header, body])
    except RemoteProtocolError:
        return
    assert isinstance(envelope.message, members(route.ask if side == "asker" else route.answer))
    assert envelope.message.frame_bytes == ()


@given(spoken(), st.integers(0, HEADER.size * 8 - 1))
def test_a_flipped_bit_of_the_header_is_refused_or_changes_only_the_numbers(said, bit):
    route, side, message, arrays = said
    frames = BusCodec(route, side).encode(message, arrays, epoch=5, seq=7)
    header = bytearray(frames[0])
    header[bit // 8] ^= 1 << bit % 8
    try:
        envelope = BusCodec(route, OTHER[side]).decode([header, *frames[1:]])
    except ProtocolError:
        assert bit < 64, "epoch and seq are judged by the conversation, not by the codec"
    else:
        assert bit >= 64
        assert (envelope.epoch, envelope.seq) != (5, 7)
        assert envelope.message == message


def test_a_deeply_nested_body_is_refused_without_a_crash():
    header = HEADER.pack(b"OTRG", 1, LIFE.id, 1, 1)
    with pytest.raises(RemoteProtocolError):
        BusCodec(LIFE, "owner").decode([header, b"\x91" * 100_000])


def test_another_version_is_told_apart():
    frames = BusCodec(GENERATE, "asker").encode(m.AskStatus(), [], epoch=1, seq=1)
    header = bytearray(frames[0])
    header[4] += 1
    with pytest.raises(RemoteProtocolError, match="bus version 2; this process speaks 1"):
        BusCodec(GENERATE, "owner").decode([header, *frames[1:]])


def test_arrays_are_views_and_never_copies():
    residual = np.arange(12, dtype=np.float32).reshape(3, 4)  # f32 [n_tokens, n_embd]
    chunk = m.RunChunk(link_epoch=1, ticket=1, position=0, n_tokens=3, n_embd=4, want=0)
    frames = BusCodec(RESIDUAL, "asker").encode(chunk, [residual], epoch=1, seq=1)
    assert np.shares_memory(np.frombuffer(frames[2], np.float32), residual)
    envelope = BusCodec(RESIDUAL, "owner").decode(frames)
    assert np.shares_memory(np.frombuffer(envelope.arrays[0], np.float32), residual)


def test_an_array_with_holes_is_refused_rather_than_copied():
    with pytest.raises(LocalProtocolError, match="without a copy"):
        byte_view(np.zeros((4, 4), np.float32)[:, ::2])


def test_an_empty_array_is_a_frame_of_no_bytes():
    done = m.ChunkDone(1, 1, 256, 0.0, 0.0, 0.0, blob_bytes=0)
    frames = BusCodec(RESIDUAL, "owner").encode(done, [np.empty((0, 576), np.uint8)], epoch=1, seq=1)
    assert [memoryview(frame).nbytes for frame in frames[2:]] == [0]
    assert BusCodec(RESIDUAL, "asker").decode(frames).message == done


def test_link_messages_may_not_be_said_by_the_wrong_side():
    with pytest.raises(LocalProtocolError, match="LinkDown is not something the asker of route link may say"):
        BusCodec(LINK, "asker").encode(m.LinkDown(1, "", "", False), [], epoch=1, seq=1)

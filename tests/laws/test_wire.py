"""The wire law: decode(encode(m)) == m for every message, however the byte stream is cut.

Random frames of every class go through the writer, a stream cut at random places, and the reader; random garbage and
damaged frames go in as well and must be refused with a RemoteProtocolError, never with anything else, and never after
an allocation over the bound. Real codec, real reader, no socket.
"""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.errors import RemoteProtocolError
from common.limits import FRAME_BYTES_MAX
from common.wire import rows
from common.wire.frames import (
    ATTENTION,
    EXT_HDR,
    HEADER,
    RESIDUAL,
    Channel,
    Frame,
    decode,
    encode,
    split_stamp,
    stamp_hash,
)
from common.wire.layout import Payload
from common.wire.stream import STAGING_BYTES, FrameReader, FrameWriter
from tests.common.wire.attention_strategies import attention_frames
from tests.common.wire.strategies import cuts, frames, row_sections

CHANNELS = {
    RESIDUAL: frames,
    ATTENTION: attention_frames,
}
CHANNEL_OF = {cls: channel for channel in CHANNELS for classes in channel.frames.values() for cls in classes}
TYPES = [(channel, number) for channel in CHANNELS for number in sorted(channel.frames)]
any_frame = frames() | attention_frames()
conversations = st.one_of(
    [st.lists(of(), min_size=1, max_size=6).map(lambda said, c=c: (c, said)) for c, of in CHANNELS.items()]
)


def read_stream(data: bytes, sizes: list[int], channel: Channel = RESIDUAL) -> list[tuple[int, bytes]]:
    """Feed `data` to a reader in pieces of at most `sizes` (repeated) and copy out the frames it reports."""
    reader = FrameReader(channel.magic, channel.bytes_max)
    found: list[tuple[int, bytes]] = []
    at, turn = 0, 0
    while at < len(data):
        buffer = reader.buffer()
        n = min(len(buffer), len(data) - at, sizes[turn % len(sizes)])
        buffer[:n] = data[at : at + n]
        found += [(raw.type, bytes(raw.payload)) for raw in reader.advance(n)]
        at, turn = at + n, turn + 1
    return found


def send_stream(channel: Channel, messages: list[Frame], sizes: list[int]) -> bytes:
    """What a transport receives that takes at most `sizes` bytes at a time."""
    writer = FrameWriter()
    for seq, message in enumerate(messages, 1):
        writer.add(encode(channel, message, epoch=7, seq=seq))
    sent = bytearray()
    turn = 0
    while writer:
        taken = b"".join(writer.buffers())[: sizes[turn % len(sizes)]]
        sent += taken
        writer.advance(len(taken))
        turn += 1
    assert writer.n_bytes == 0
    return bytes(sent)


@given(conversation=conversations, send_sizes=cuts, read_sizes=cuts)
def test_every_message_survives_every_cut(conversation, send_sizes, read_sizes):
    channel, messages = conversation
    stream = send_stream(channel, messages, send_sizes)
    found = read_stream(stream, read_sizes, channel)
    assert len(found) == len(messages)
    for seq, (message, (frame_type, payload)) in enumerate(zip(messages, found, strict=True), 1):
        stamp, body = split_stamp(frame_type, memoryview(payload))
        assert decode(channel, frame_type, body) == message
        assert (stamp is not None) == message.stamped
        if stamp is not None:
            assert (stamp.epoch, stamp.seq) == (7, seq)
            assert stamp.xxh3 == stamp_hash(frame_type, 7, seq, (body,))


@pytest.mark.parametrize("cls", CHANNEL_OF, ids=lambda cls: f"{CHANNEL_OF[cls].name}-{cls.__name__}")
def test_every_class_is_drawn_and_returns(cls):
    """No class escapes the law because a strategy forgot it."""
    channel = CHANNEL_OF[cls]

    @settings(max_examples=10)
    @given(CHANNELS[channel](cls))
    def holds(message):
        assert type(message) is cls
        buffers = encode(channel, message, epoch=1, seq=1)
        body = memoryview(b"".join(buffers))[HEADER.size + (EXT_HDR.size if message.stamped else 0) :]
        again = decode(channel, cls.TYPE, body)
        assert type(again) is cls
        assert again == message

    holds()


@given(message=frames(), pieces=st.lists(st.binary(max_size=40), min_size=2, max_size=5))
def test_payload_pieces_are_not_joined(message, pieces):
    """A payload in pieces equals the same bytes in one, and reaches the socket in its own buffers."""
    whole, cut = Payload(b"".join(pieces)), Payload(*pieces)
    assert whole == cut
    if type(message).REST == "payload" and type(message).__name__ in ("Pong", "StateData", "StateData2"):
        fields = {"answers": message.answers} if hasattr(message, "answers") else {}
        last = "data" if type(message).__name__ == "Pong" else "blob"
        buffers = encode(RESIDUAL, type(message)(**fields, **{last: cut}), epoch=1, seq=1)
        assert buffers[1:] == list(cut.parts)
        assert b"".join(buffers) == b"".join(
            encode(RESIDUAL, type(message)(**fields, **{last: whole}), epoch=1, seq=1)
        )


@given(data=st.binary(max_size=300), sizes=cuts)
def test_garbage_is_refused_or_incomplete(data, sizes):
    try:
        found = read_stream(data, sizes)
    except RemoteProtocolError as error:
        assert len(str(error)) < 200
    else:
        assert found == [] or data.startswith(RESIDUAL.magic.to_bytes(4, "little"))


@given(
    kind=st.sampled_from(TYPES) | st.tuples(st.sampled_from(list(CHANNELS)), st.integers(0, 2**32 - 1)),
    payload=st.binary(max_size=400),
    sizes=cuts,
)
def test_framed_garbage_is_decoded_or_refused(kind, payload, sizes):
    """A well-formed header before random bytes: what comes out is a message or a RemoteProtocolError."""
    channel, frame_type = kind
    data = HEADER.pack((channel.magic, frame_type, len(payload))) + payload
    try:
        ((found_type, found),) = read_stream(data, sizes, channel)
        _, body = split_stamp(found_type, memoryview(found))
        message = decode(channel, found_type, body)
    except RemoteProtocolError as error:
        assert len(str(error)) < 400
    else:
        assert type(message) in channel.frames[frame_type]


@given(message=any_frame, flip=st.integers(0, 10**6), bit=st.integers(0, 7))
def test_a_flipped_bit_never_passes_the_hash(message, flip, bit):
    if not message.stamped:
        return
    stream = bytearray(b"".join(encode(CHANNEL_OF[type(message)], message, epoch=3, seq=9)))
    at = HEADER.size + flip % (len(stream) - HEADER.size)
    stream[at] ^= 1 << bit
    stamp, body = split_stamp(message.TYPE, memoryview(stream)[HEADER.size :])
    assert stamp is not None
    assert stamp_hash(message.TYPE, stamp.epoch, stamp.seq, (body,)) != stamp.xxh3


@pytest.mark.parametrize("announced", [FRAME_BYTES_MAX + 1, 2**40, 2**64 - 1])
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: f"{kind[0].name}-{kind[1]}")
def test_a_long_frame_is_refused_before_anything_is_allocated(kind, announced):
    channel, frame_type = kind
    header = HEADER.pack((channel.magic, frame_type, announced))
    tracemalloc.start()
    try:
        with pytest.raises(RemoteProtocolError, match="announces"):
            read_stream(header, [len(header)], channel)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * STAGING_BYTES


@given(sections=row_sections(), cut=st.integers(0, 10**6), flip=st.integers(0, 255))
def test_rows_return_whole_and_are_refused_cut(sections, cut, flip):
    blob = bytes(rows.encode_rows(sections).joined())
    again = rows.decode_rows(blob)
    assert [(s.layer, s.kind, s.ggml_type, s.p0, s.p1, s.row_bytes, bytes(s.data)) for s in again] == [
        (s.layer, s.kind, s.ggml_type, s.p0, s.p1, s.row_bytes, bytes(memoryview(s.data).cast("B")))
        for s in sections
    ]
    with pytest.raises(RemoteProtocolError):
        rows.decode_rows(blob[: cut % len(blob)])
    with pytest.raises(RemoteProtocolError):
        rows.decode_rows(blob + b"\0")
    damaged = bytearray(blob)
    damaged[cut % len(blob)] ^= flip
    try:
        rows.decode_rows(damaged)
    except RemoteProtocolError as error:
        assert len(str(error)) < 200


def test_decoded_rows_are_views():
    data = np.arange(12, dtype=np.uint8)
    blob = bytearray(rows.encode_rows([rows.RowSection(3, rows.KIND_K, 1, 4, 7, 4, data)]).joined())
    (section,) = rows.decode_rows(blob)
    blob[-1] = 99
    assert bytes(section.data)[-1] == 99

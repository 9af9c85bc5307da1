"""What the wire law does not say of the reader and the writer: long payloads are received in place, several frames may
come at once, and a writer hands out its own buffers.
"""

from __future__ import annotations

import numpy as np
import pytest

from common.errors import RemoteProtocolError
from common.wire import base_frames as base
from common.wire.frames import HEADER, RESIDUAL, encode
from common.wire.layout import Payload
from common.wire.stream import SEND_BUFFERS_MAX, STAGING_BYTES, FrameReader, FrameWriter


def feed(reader: FrameReader, data: bytes):
    """Put as much of `data` as fits into the reader's buffer; returns (frames, bytes taken)."""
    buffer = reader.buffer()
    n = min(len(buffer), len(data))
    buffer[:n] = data[:n]
    return list(reader.advance(n)), n


def test_many_small_frames_come_out_of_one_read():
    reader = FrameReader(RESIDUAL.magic, RESIDUAL.bytes_max)
    data = b"".join(b"".join(encode(RESIDUAL, base.Trim(n))) for n in range(100))
    frames, n = feed(reader, data)
    assert n == len(data)
    assert [int.from_bytes(raw.payload, "little") for raw in frames] == list(range(100))


def test_a_long_payload_is_received_where_it_stays():
    reader = FrameReader(RESIDUAL.magic, RESIDUAL.bytes_max)
    payload = np.random.default_rng(0).bytes(5 * STAGING_BYTES)
    data = b"".join(encode(RESIDUAL, base.StateData(Payload(payload)))) + b"".join(
        encode(RESIDUAL, base.Bye())
    )
    frames, n = feed(reader, data)
    assert frames == [] and n == STAGING_BYTES
    place = reader.buffer()
    assert len(place) == HEADER.size + len(payload) - STAGING_BYTES, "exactly the rest of this payload"
    (long,), more = feed(reader, data[n:])
    assert bytes(long.payload) == payload
    assert np.shares_memory(np.frombuffer(long.payload, np.uint8), np.frombuffer(place, np.uint8))
    (bye,), _ = feed(reader, data[n + more :])
    assert bye.type == base.Bye.TYPE


def test_the_bound_of_the_moment_is_asked_for_each_frame():
    asked = []
    reader = FrameReader(RESIDUAL.magic, lambda frame_type: asked.append(frame_type) or 8)
    feed(reader, b"".join(encode(RESIDUAL, base.Trim(1))))
    with pytest.raises(RemoteProtocolError, match="announces 12 bytes, at most 8 now"):
        feed(reader, b"".join(encode(RESIDUAL, base.StateRange(0, 1, 1))))
    assert asked == [base.Trim.TYPE, base.StateRange.TYPE]


def test_a_writer_hands_out_its_buffers_and_remembers_partial_sends():
    parts = [memoryview(bytes([n % 256]) * 3) for n in range(2 * SEND_BUFFERS_MAX)]
    writer = FrameWriter()
    writer.add(parts)
    assert writer.buffers()[0] is parts[0] and len(writer.buffers()) == SEND_BUFFERS_MAX
    writer.advance(4)
    assert bytes(writer.buffers()[0]) == b"\1\1"
    writer.advance(writer.n_bytes)
    assert not writer and writer.buffers() == []

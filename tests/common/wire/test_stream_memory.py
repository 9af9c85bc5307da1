"""Aim: memory of long payloads is used again, but never while anybody looks at it; their hash is taken on the way.

Method: hypothesis cuts streams of long frames and keeps some of the payloads; what was kept must stay as it was.
"""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from common.wire.extension_frames import StateData2
from common.wire.frames import EXT_HDR, RESIDUAL, encode, stamp_hash
from common.wire.layout import Payload
from common.wire.stream import KEPT_BYTES_MIN, FrameReader


def frame(seq: int, n_bytes: int) -> tuple[bytes, bytes]:
    blob = np.random.default_rng(seq).bytes(n_bytes)
    return b"".join(encode(RESIDUAL, StateData2(1, Payload(blob)), epoch=9, seq=seq)), blob


def read(reader: FrameReader, stream: bytes, cut: int):
    """The frames of `stream`, given in turns of at most `cut` bytes, as a socket would."""
    at = 0
    while at < len(stream):
        buffer = reader.buffer()
        n = min(len(buffer), cut, len(stream) - at)
        buffer[:n] = stream[at : at + n]
        at += n
        yield from reader.advance(n)


@settings(deadline=None, max_examples=20)
@given(
    st.lists(st.tuples(st.integers(0, 60_000), st.booleans()), min_size=2, max_size=8),
    st.integers(1000, 700_000),
)
def test_what_is_kept_never_changes_and_digests_are_right(frames: list[tuple[int, bool]], cut: int) -> None:
    reader, kept = FrameReader(RESIDUAL.magic, RESIDUAL.bytes_max), []
    for seq, (extra, keep) in enumerate(frames, 1):
        stream, blob = frame(seq, KEPT_BYTES_MIN + extra)
        (raw,) = read(reader, stream, cut)
        assert bytes(raw.payload[EXT_HDR.size + 8 :]) == blob
        body = raw.payload[EXT_HDR.size :]
        expected = stamp_hash(raw.type, 9, seq, (body,))
        assert raw.digest == expected
        assert EXT_HDR.unpack(raw.payload)[2] == expected
        if keep:
            kept.append((blob, body[8:]))
        del raw, body
    for blob, view in kept:
        assert view == blob


def test_memory_that_nobody_looks_at_is_used_again() -> None:
    reader, addresses = FrameReader(RESIDUAL.magic, RESIDUAL.bytes_max), []
    for seq in range(1, 9):
        (raw,) = read(reader, frame(seq, 2 * KEPT_BYTES_MIN)[0], 1 << 20)
        addresses.append(np.frombuffer(raw.payload, np.uint8).__array_interface__["data"][0])
        del raw
    assert len(set(addresses)) == 1


def test_a_frame_cut_within_its_stamp_is_hashed_by_the_link() -> None:
    """Too little of the payload came with the header to begin a hash with: digest None means "hash it yourself"."""
    reader = FrameReader(RESIDUAL.magic, RESIDUAL.bytes_max)
    (raw,) = read(reader, frame(1, 100)[0], 20)
    assert raw.digest is None

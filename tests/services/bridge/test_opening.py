"""Aim: the first words after the greeting measure what they should and nothing twice. Method: the pure parts, asked."""

from __future__ import annotations

import pytest

from common.errors import WorkerRefusedError
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from services.bridge.opening import CHUNKS, PINGS, Opening, Paces


def talk(opening: Opening, compute_ms: float = 512.0) -> list[str]:
    """What is said, with every frame answered at once."""
    said = []
    while (frame := opening.next()) is not None:
        said.append(frame.NAME)
        match frame:
            case base.Ping():
                opening.took(base.Pong(frame.data), len(said) * 1e-5)
            case ext.Chunk2():
                assert frame.pos0 == frame.n_tok * (said.count("CHUNK2") - 1)
                opening.took(ext.Chunk2Ack(1, frame.n_tok, 0, 0, compute_ms / said.count("CHUNK2"), 0), 1.0)
            case ext.Trim2():
                assert frame.n == 0
                opening.took(ext.Ok2(1, 0), 1.0)
    return said


def test_an_unknown_worker_is_timed_by_the_second_chunk_and_left_empty() -> None:
    opening = Opening(64, 1024, None)
    assert talk(opening) == ["PING"] * PINGS + ["CHUNK2"] * CHUNKS + ["TRIM2"]
    assert opening.token_ms == 1.0
    assert opening.rtt_us == pytest.approx(50)


def test_a_known_worker_is_only_pinged() -> None:
    opening = Opening(64, 1024, 3.5)
    assert talk(opening) == ["PING"] * PINGS
    assert opening.token_ms == 3.5


def test_a_worker_that_refuses_a_chunk_is_of_no_use() -> None:
    with pytest.raises(WorkerRefusedError, match="cannot run a chunk: E401 no memory"):
        Opening(64, 512, None).took(ext.Err2.of(1, 401, 0, "no memory"), 1.0)


def test_a_pace_is_known_of_one_boot_and_one_split_only() -> None:
    paces = Paces()
    assert paces.of(1, 40) is None
    paces.keep(1, 40, None)
    paces.keep(1, 40, 2.5)
    assert (paces.of(1, 40), paces.of(2, 40), paces.of(1, 20)) == (2.5, None, 1.25), (
        "layers are taken for alike"
    )

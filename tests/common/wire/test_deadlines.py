"""Allowances for answers: never below the floor, never below what was measured, growing with what is ahead."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.wire.deadlines import AckClock

tokens = st.integers(1, 4096)


@given(
    n_tokens=tokens, ahead=st.integers(0, 8192), compute_ms=st.floats(0, 1e5), n_bytes=st.integers(0, 1 << 28)
)
def test_an_allowance_covers_what_the_last_chunk_took(n_tokens, ahead, compute_ms, n_bytes):
    clock = AckClock()
    unknown = clock.allowance_s(n_tokens, ahead, n_bytes)
    clock.learn(n_tokens, compute_ms)
    known = clock.allowance_s(n_tokens, ahead, n_bytes)
    assert unknown >= clock.first_s
    assert known >= clock.floor_s
    assert known >= compute_ms / 1000 * (n_tokens + ahead) / n_tokens
    assert clock.allowance_s(n_tokens, ahead + 1, n_bytes) >= known


def test_the_pace_rises_at_once_and_falls_slowly():
    clock = AckClock()
    for compute_ms in (100.0, 1000.0):
        clock.learn(100, compute_ms)
        assert clock.token_ms == compute_ms / 100
    clock.learn(100, 0.0)
    assert clock.token_ms == 9.0


@given(ahead=st.integers(0, 8192), compute_ms=st.floats(0, 1e5), n_bytes=st.integers(0, 1 << 28))
def test_moving_rows_waits_for_the_chunks_ahead_and_not_for_a_guess_once_the_pace_is_known(
    ahead, compute_ms, n_bytes
):
    clock = AckClock(first_s=60.0, floor_s=3.0)
    assert clock.allowance_s(0, ahead, 0) >= 15.0
    clock.learn(256, compute_ms)
    assert clock.allowance_s(0, ahead, n_bytes) >= compute_ms / 1000 * ahead / 256 + n_bytes / 1e9
    assert clock.allowance_s(0, 0, 0) == clock.floor_s, "a frozen worker is given up as soon as with a chunk"

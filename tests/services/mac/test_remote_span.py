"""Aim: nothing a worker answers is believed before it is checked, and every failure is one LinkError with its cause.
Method: a RemoteSpan over a channel whose far end is this test: it builds real answers and spoils them one way each."""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import LinkDeadlineError, LinkDownError, LinkError, OutOfMemoryError, StaleEpochError
from common.wire import messages as m
from common.wire.rows import RowSection, encode_rows
from services.mac.remote_span import ANSWER_S_MIN, FIRST_ANSWER_S, RemoteSpan, answer_deadline_s
from services.mac.rows_check import TailRows

N_EMBD = 8
HYBRID = SimpleNamespace(kind=lambda layer: "attention" if layer % 4 == 3 else "recurrent")
ROWS = TailRows(HYBRID, 4, 8)


class FarEnd:
    """The channel's other end: answers are put in by hand; time passes only when somebody waits."""

    def __init__(self):
        self.sent, self.answers, self.now_s = [], deque(), 0.0
        self.n_losses = 3

    def send(self, message, *arrays):
        self.sent.append((message, arrays))

    def recv(self, timeout_s):
        if self.answers:
            return self.answers.popleft()
        self.now_s += timeout_s
        return None

    def losses(self):
        return self.n_losses

    def clock(self):
        return self.now_s

    def answer(self, message, blob=b""):
        self.answers.append(SimpleNamespace(message=message, frames=(memoryview(blob),)))


def make_span(window=2):
    far = FarEnd()
    return far, RemoteSpan(
        far, ROWS, link_epoch=7, window=window, tickets=itertools.count(1), clock=far.clock
    )


def tail_sections(p0, p1, with_state):
    """What the tail [4, 8) of a hybrid owes: K and V of layer 7, states of layers 4, 5 and 6."""
    rows = np.arange((p1 - p0) * 4, dtype=np.float16)
    sections = [RowSection(7, kind, 1, p0, p1, 8, rows.view(np.uint8)) for kind in (0, 1)]
    if with_state:
        state = np.ones(6, np.float32).view(np.uint8)
        sections += [RowSection(layer, kind, 0, p1, p1, 24, state) for layer in (4, 5, 6) for kind in (2, 3)]
    return sections


def done(ticket, n_tokens, sections, **changes):
    blob = encode_rows(sections).joined()
    message = m.ChunkDone(7, ticket, n_tokens, 12.0, 1.0, 15.0, len(blob))
    return msg_replace(message, **changes), blob


def msg_replace(message, **changes):
    return type(message)(**{f: changes.get(f, getattr(message, f)) for f in message.__struct_fields__})


def start(span, position=0, n_tokens=16, want_state=False):
    span.start_run(np.zeros((n_tokens, N_EMBD), np.float32), position, want_state=want_state)


def test_answers_come_home_in_order_with_their_rows():
    far, span = make_span()
    start(span, 0)
    start(span, 16, want_state=True)
    assert [message.want for message, _ in far.sent] == [m.WANT_ROWS, m.WANT_ROWS | m.WANT_STATE]
    assert span.n_in_flight == 2 and span.wait(0.1) is None
    far.answer(*done(1, 16, tail_sections(0, 16, False)))
    far.answer(*done(2, 16, tail_sections(16, 32, True)))
    first, second = span.wait(0.1), span.wait(0.1)
    assert (first.end, second.end, span.mirror.n) == (16, 32, 32)
    assert not first.has_state and second.has_state and len(second.sections) == 8
    assert (first.worker_s, first.round_trip_s) == (0.012, 0.015)
    assert span.n_in_flight == 0 and span.wait(0.1) is None


def spoiled(name):
    """(message, blob) for ticket 1, 16 tokens at 0 with state, spoiled in one way."""
    good = tail_sections(0, 16, True)
    nan = np.full(64, np.nan, np.float16).view(np.uint8)
    infinite = np.array([0, 1, 2, -np.inf, 4, 5], np.float32).view(np.uint8)
    match name:
        case "a row is missing":
            return done(1, 16, good[1:])
        case "a row comes twice":
            return done(1, 16, [*good, good[0]])
        case "the range is off by one":
            return done(1, 16, [replace(good[0], p0=1, p1=17), *good[1:]])
        case "a layer of somebody else":
            return done(1, 16, [replace(good[0], layer=3), *good[1:]])
        case "a row is NaN":
            return done(1, 16, [replace(good[0], data=nan), *good[1:]])
        case "a state is infinite":
            return done(1, 16, [*good[:-1], replace(good[-1], data=infinite)])
        case "fewer tokens":
            return done(1, 15, good)
        case "an old epoch":
            return done(1, 16, good, link_epoch=6)
        case "an answer to something else":
            return m.MirrorAt(7, 1, 16), b""
        case "a later ticket":
            return done(2, 16, good)
        case "garbage":
            return m.ChunkDone(7, 1, 16, 1.0, 1.0, 1.0, 5), b"ROWSx"
    raise AssertionError(name)


SPOILED = {
    "a row is missing": "range",
    "a row comes twice": "range",
    "the range is off by one": "range",
    "a layer of somebody else": "range",
    "a row is NaN": "nonfinite",
    "a state is infinite": "nonfinite",
    "fewer tokens": "count",
    "an old epoch": "stale_epoch",
    "an answer to something else": "count",
    "a later ticket": "order",
    "garbage": "damaged",
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_spoiled_answer_raises_and_says_how(name):
    far, span = make_span()
    start(span, want_state=True)
    far.answer(*spoiled(name))
    with pytest.raises(LinkError) as caught:
        span.wait(0.1)
    assert caught.value.cause == SPOILED[name]


@pytest.mark.parametrize(
    "code, error, cause",
    [
        (LinkDownError.code, LinkDownError, "down"),
        (LinkDeadlineError.code, LinkDeadlineError, "deadline"),
        (StaleEpochError.code, StaleEpochError, "stale_epoch"),
        (OutOfMemoryError.code, LinkError, "word"),
        (400, LinkError, "word"),
    ],
)
def test_a_failure_told_by_the_bridge_keeps_its_kind(code, error, cause):
    far, span = make_span()
    start(span)
    far.answer(m.LinkFailed(7, 1, code, "word", "what happened"))
    with pytest.raises(error, match="what happened") as caught:
        span.wait(0.1)
    assert caught.value.cause == cause


def test_silence_is_a_failure_after_the_deadline_and_not_before():
    far, span = make_span()
    start(span)
    while far.now_s + 10 < FIRST_ANSWER_S:
        assert span.wait(10) is None
    with pytest.raises(LinkDeadlineError, match="no answer"):
        span.wait(20)


def test_a_bridge_that_went_away_is_noticed_at_once_and_what_came_home_before_counts():
    far, span = make_span()
    start(span, 0)
    start(span, 16)
    far.answer(*done(1, 16, tail_sections(0, 16, False)))
    far.n_losses += 1
    assert span.wait(0.0).end == 16
    with pytest.raises(LinkDownError, match="bridge went away"):
        span.wait(0.0)
    next_life = RemoteSpan(far, ROWS, link_epoch=8, window=2, tickets=itertools.count(9), clock=far.clock)
    start(next_life)
    assert next_life.wait(0.1) is None


@given(st.floats(0, 1000), st.integers(1, 16))
def test_the_deadline_leaves_room_for_what_is_under_way(worker_s, n_in_flight):
    limit_s = answer_deadline_s(worker_s, n_in_flight)
    assert limit_s >= max(ANSWER_S_MIN, 2 * worker_s * n_in_flight)


def test_answers_to_an_abandoned_read_are_dropped():
    far, span = make_span()
    start(span, 0)
    start(span, 16)
    span.abandon()
    assert span.n_in_flight == 0 and span.mirror.dirty
    span.start_rewind(0)
    far.answer(*done(1, 16, tail_sections(0, 16, False)))
    far.answer(m.LinkFailed(7, 2, 600, "late", ""))
    far.answer(m.MirrorAt(7, 3, 0))
    assert span.wait(1.0).n == 0
    assert span.late_answers == 2 and not span.mirror.dirty


def test_a_cancelled_read_is_told_to_the_worker_which_trims_to_what_was_acknowledged():
    far, span = make_span()
    span.cancel()
    assert far.sent == [], "nothing was under way"
    start(span, 0)
    start(span, 16)
    far.answer(*done(1, 16, tail_sections(0, 16, False)))
    assert span.wait(1.0).end == 16
    span.cancel()
    assert far.sent[-1][0] == m.RewindMirror(7, 3, 16)
    far.answer(m.LinkFailed(7, 2, 601, "down", "nobody waits for this chunk"))
    far.answer(m.MirrorAt(7, 3, 16))
    assert span.wait(1.0).n == 16 == span.mirror.n and not span.mirror.dirty


def test_pushes_and_rewinds_must_leave_the_mirror_where_they_should():
    far, span = make_span()
    span.start_rewind(16)
    far.answer(m.MirrorAt(7, 1, 0))
    assert span.wait(0.1).n == 0 == span.mirror.n
    span.start_push(tail_sections(0, 16, True), 16, with_state=True)
    (message, (blob,)) = far.sent[-1]
    assert message.flags == m.ROWS_KV | m.ROWS_STATE and message.blob_bytes == len(blob)
    far.answer(m.MirrorAt(7, 2, 15))
    with pytest.raises(LinkError, match="stands at 15"):
        span.wait(0.1)
    span.start_rewind(4)
    far.answer(m.MirrorAt(7, 3, 8))
    with pytest.raises(LinkError, match="at most"):
        span.wait(0.1)

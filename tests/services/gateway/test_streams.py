"""The request table turns what a host says into one answer that ends exactly once, and never loses credit or text.

Method: hypothesis plays the host (random tokens, cancels, stop strings, failures) against the table; no process, no
clock.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.limits import TOKEN_CREDIT
from common.wire import messages as m
from services.gateway.streams import (
    GRACE_S,
    Broken,
    Ended,
    Reading,
    RequestTable,
    Stream,
    Waiting,
    Wrote,
    generated_text,
)

END = 0
VOCABULARY = [b"", *(bytes([byte]) for byte in "abcé".encode()), "é".encode(), b"ab", "😀".encode()]
token_ids = st.lists(st.integers(1, len(VOCABULARY) - 1), max_size=80)
stops = st.lists(st.text("abcé", min_size=1, max_size=3), max_size=3)


def new_table() -> RequestTable:
    return RequestTable(VOCABULARY.__getitem__, frozenset({END}))


def open_stream(table: RequestTable, stops=(), request_id="r", expires_at=100.0) -> Stream:
    return table.open(request_id, n_prompt=3, stops=stops, expires_at=expires_at, wake=lambda: None)


def finished(reason: str, n_generated: int, request_id="r") -> m.Finished:
    report = m.ReadReport(tokens_cache=2)
    return m.Finished(request_id, reason, n_prompt=3, n_generated=n_generated, report=report)


def play(table: RequestTable, ids, reason="length") -> list[m.Message]:
    """A host that sends `ids`, obeys a Cancel, and finishes. Returns everything it was told."""
    told: list[m.Message] = []
    n_sent = 0
    for index, token_id in enumerate(ids):
        told += table.apply(m.TokenReady("r", index, token_id))
        n_sent += 1
        if any(isinstance(message, m.Cancel) for message in told):
            reason = "cancelled"
            break
    told += table.apply(finished(reason, n_sent))
    return told


@given(ids=token_ids, stops=stops, takes=st.randoms())
def test_streamed_and_whole_text_agree_and_no_stop_string_leaks(ids, stops, takes):
    table = new_table()
    stream = open_stream(table, stops)
    pieces = []
    for index, token_id in enumerate(ids):
        table.apply(m.TokenReady("r", index, token_id))
        if takes.random() < 0.5:
            pieces += table.take(stream)[0]
    table.apply(finished("length", len(ids)))
    pieces += table.take(stream)[0]
    streamed = "".join(generated_text(pieces))

    other = new_table()
    whole = open_stream(other, stops)
    play(other, ids)
    assert streamed == "".join(generated_text(other.take(whole)[0]))
    at_once = b"".join(VOCABULARY[i] for i in ids).decode("utf-8", "replace")
    assert at_once.startswith(streamed)
    assert not any(stop in streamed for stop in stops)
    if not any(stop in at_once for stop in stops):
        assert streamed == at_once


@given(ids=token_ids, stops=stops)
def test_an_answer_ends_once_and_a_stop_string_cancels_it(ids, stops):
    table = new_table()
    stream = open_stream(table, stops)
    told = play(table, ids)
    pieces, _ = table.take(stream)
    ends = [piece for piece in pieces if isinstance(piece, Ended | Broken)]
    assert ends == pieces[-1:] and isinstance(ends[0], Ended)
    at_once = b"".join(VOCABULARY[i] for i in ids).decode("utf-8", "replace")
    stopped_by_string = m.Cancel("r") in told
    assert stopped_by_string <= any(stop in at_once for stop in stops)
    assert ends[0].reason == ("stop" if stream.text.stopped else "length")
    assert (ends[0].usage.n_prompt, ends[0].usage.n_cached) == (3, 2)
    assert ends[0].usage.n_generated == sum(isinstance(piece, Wrote) for piece in pieces)
    assert table.close(stream) == [] and len(table) == 0


def test_tokens_sent_before_the_host_heard_of_the_cancel_are_neither_text_nor_usage():
    table = new_table()
    stream = open_stream(table, ["b"])
    assert table.apply(m.TokenReady("r", 0, 1)) == []
    assert table.apply(m.TokenReady("r", 1, 2)) == [m.Cancel("r")]
    assert table.apply(m.TokenReady("r", 2, 3)) == []
    table.apply(finished("cancelled", 3))
    pieces, _ = table.take(stream)
    assert list(generated_text(pieces)) == ["a"]
    assert pieces[-1] == Ended("", "stop", pieces[-1].usage, pieces[-1].report)
    assert pieces[-1].usage.n_generated == 2


@given(batches=st.lists(st.integers(1, 100), min_size=1, max_size=12))
def test_credit_never_runs_out_while_the_consumer_takes(batches):
    table = new_table()
    stream = open_stream(table)
    granted, sent = TOKEN_CREDIT, 0
    for n_batch in batches:
        for _ in range(n_batch):
            table.apply(m.TokenReady("r", sent, 1))
            sent += 1
        pieces, grants = table.take(stream)
        assert len(pieces) == n_batch
        granted += sum(grant.credit for grant in grants)
        assert TOKEN_CREDIT // 2 < granted - sent <= TOKEN_CREDIT  # bounded, and never starving


def test_progress_nobody_took_is_replaced_by_newer_progress():
    table = new_table()
    stream = open_stream(table)
    for message in (m.Queued("r", 2), m.Queued("r", 1), *(m.PrefillAdvanced("r", i, 9) for i in range(9))):
        table.apply(message)
    assert table.take(stream)[0] == [Waiting(1), Reading(8, 9)]


def test_a_lost_token_breaks_the_answer_and_cancels_it():
    table = new_table()
    stream = open_stream(table)
    table.apply(m.TokenReady("r", 0, 1))
    assert table.apply(m.TokenReady("r", 2, 1)) == [m.Cancel("r")]
    broken = table.take(stream)[0][-1]
    assert isinstance(broken, Broken) and "token 1 of the answer was lost" in str(broken.error)
    assert table.apply(m.TokenReady("r", 3, 1)) == [] and table.take(stream)[0] == []


def test_tokens_missing_at_the_end_break_the_answer():
    table = new_table()
    stream = open_stream(table)
    table.apply(m.TokenReady("r", 0, 1))
    table.apply(finished("stop", 3))
    assert "2 tokens were lost" in str(table.take(stream)[0][-1].error)


def test_a_failure_keeps_the_class_it_had_in_the_host():
    table = new_table()
    stream = open_stream(table)
    table.apply(m.Failed("r", 103, "64 requests wait already"))
    (broken,) = table.take(stream)[0]
    assert (broken.error.status, broken.error.kind) == (429, "rate_limit_error")
    assert str(broken.error) == "64 requests wait already"


def test_a_lost_host_breaks_running_answers_and_only_those():
    table = new_table()
    done, running = open_stream(table, request_id="done"), open_stream(table, request_id="running")
    table.apply(finished("stop", 0, "done"))
    table.break_all("the host was lost")
    assert isinstance(table.take(done)[0][-1], Ended)
    assert "the host was lost" in str(table.take(running)[0][-1].error)
    assert table.close(running) == []  # a dead host need not be told


def test_a_consumer_that_leaves_cancels_its_own_request_only():
    table = new_table()
    one, two = open_stream(table, request_id="one"), open_stream(table, request_id="two")
    assert table.close(one) == [m.Cancel("one")]
    assert table.close(one) == []
    assert table.apply(m.TokenReady("one", 0, 1)) == []
    table.apply(m.TokenReady("two", 0, 1))
    assert table.take(two)[0] == [Wrote("a")]


@given(now=st.floats(0, 1000, allow_nan=False))
def test_deadlines_end_what_the_host_forgot(now):
    table = new_table()
    stream = open_stream(table, expires_at=100.0)
    told = table.expire(now)
    assert told == ([m.Cancel("r")] if now > 100.0 + GRACE_S else [])
    assert stream.over == bool(told)

"""The request table turns what a host says into one answer that ends exactly once, and never loses credit or text.

Method: hypothesis plays the host (random tokens, cancels, stop strings, failures) against the table; no process, no
clock.
"""

from __future__ import annotations

import codecs

from hypothesis import given
from hypothesis import strategies as st

from common.limits import TOKEN_CREDIT
from common.wire import messages as m
from services.gateway.streams import (
    GRACE_S,
    Broken,
    ChoiceEnded,
    Ended,
    Reading,
    RequestTable,
    Stream,
    Waiting,
    Wrote,
)

END = 0
VOCABULARY = [b"", *(bytes([byte]) for byte in "abcé".encode()), "é".encode(), b"ab", "😀".encode()]
token_ids = st.lists(st.integers(1, len(VOCABULARY) - 1), max_size=80)
stops = st.lists(st.text("abcé", min_size=1, max_size=3), max_size=3)


def new_table() -> RequestTable:
    return RequestTable(VOCABULARY.__getitem__, frozenset({END}))


def open_stream(table: RequestTable, stops=(), request_id="r", expires_at=100.0, n_choices=1) -> Stream:
    return table.open(
        request_id, n_prompt=3, stops=stops, expires_at=expires_at, wake=lambda: None, n_choices=n_choices
    )


def texts_of(pieces, choice=0) -> str:
    written = [p for p in pieces if isinstance(p, Wrote | ChoiceEnded | Ended) and p.choice == choice]
    return "".join(piece.text for piece in written)


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
    streamed = texts_of(pieces)

    other = new_table()
    whole = open_stream(other, stops)
    play(other, ids)
    assert streamed == texts_of(other.take(whole)[0])
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
    assert ends[0].reason == ("stop" if stream.choices[0].stopped else "length")
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
    assert texts_of(pieces) == "a"
    assert pieces[-1] == Ended("", "stop", pieces[-1].usage, pieces[-1].report)
    assert pieces[-1].usage.n_generated == 2


def told_of(pieces, choice=0) -> list[bytes]:
    return [
        token.chosen.data
        for piece in pieces
        if isinstance(piece, Wrote | ChoiceEnded | Ended) and piece.choice == choice
        for token in piece.told
    ]


def whole_characters(data: bytes) -> str:
    """The text of bytes, without a last character that is not complete."""
    return codecs.getincrementaldecoder("utf-8")("replace").decode(data)


@given(ids=token_ids, stops=stops)
def test_what_is_told_of_tokens_is_held_back_with_their_text(ids, stops):
    table = new_table()
    stream = open_stream(table, stops)
    text, told, n_told = "", b"", 0
    for index, token_id in enumerate(ids):
        table.apply(m.TokenReady("r", index, token_id, logprobs=m.TokenLogprobs(-1.0, ((token_id, -1.0),))))
        pieces = table.take(stream)[0]
        text += texts_of(pieces)
        told += b"".join(told_of(pieces))
        n_told += len(told_of(pieces))
        assert sum(len(p.token_ids) for p in pieces) == len(told_of(pieces))
        assert text.startswith(whole_characters(told)), "never more than the text that has left"
    table.apply(finished("length", len(ids)))
    pieces = table.take(stream)[0]
    text += texts_of(pieces)
    told += b"".join(told_of(pieces))
    n_told += len(told_of(pieces))
    if stream.choices[0].stopped:
        assert text.startswith(whole_characters(told))
        assert not any(stop in told.decode("utf-8", "replace") for stop in stops)
    else:
        assert n_told == len(ids) and told.decode("utf-8", "replace") == text


@given(st.data(), stops)
def test_choices_are_answers_of_their_own_and_usage_is_their_sum(data, stops):
    """Whatever order a host writes its choices in, each is what it would be alone, and all end with the last."""
    ids = [data.draw(token_ids) for _ in range(3)]
    table, n_sent, open_choices = new_table(), [0, 0, 0], {0, 1, 2}
    stream, pieces = open_stream(table, stops, n_choices=3), []
    while open_choices:
        choice = data.draw(st.sampled_from(sorted(open_choices)))
        cancelled = False
        if n_sent[choice] < len(ids[choice]):
            token_id = ids[choice][n_sent[choice]]
            told = table.apply(m.TokenReady("r", n_sent[choice], token_id, choice))
            n_sent[choice] += 1
            cancelled = told == [m.Cancel("r", choice)]
            assert cancelled or told == []
        if cancelled or n_sent[choice] == len(ids[choice]):
            open_choices.discard(choice)
            reason = "cancelled" if cancelled else "length"
            if open_choices:
                table.apply(m.ChoiceFinished("r", choice, reason, n_sent[choice]))
            else:
                report = m.ReadReport(tokens_cache=2)
                table.apply(m.Finished("r", reason, 3, n_sent[choice], report, choice))
        pieces += table.take(stream)[0]
    assert stream.over and isinstance(pieces[-1], Ended)
    assert pieces[-1].usage.n_generated == sum(isinstance(piece, Wrote) for piece in pieces)
    assert pieces[-1].usage.n_prompt == 3
    for choice in range(3):
        alone = new_table()
        single = open_stream(alone, stops)
        play(alone, ids[choice])
        expected = alone.take(single)[0]
        assert texts_of(pieces, choice) == texts_of(expected)
        ends = [p for p in pieces if isinstance(p, ChoiceEnded | Ended) and p.choice == choice]
        assert [end.reason for end in ends] == [expected[-1].reason]


def test_stop_strings_that_end_all_choices_at_once_end_them_all():
    table = new_table()
    stream = open_stream(table, ["b"], n_choices=2)
    for choice in range(2):
        assert table.apply(m.TokenReady("r", 0, 2, choice)) == [m.Cancel("r", choice)]
    table.apply(m.Finished("r", "cancelled", 3, 1, m.ReadReport(), 1))
    ends = [p for p in table.take(stream)[0] if isinstance(p, ChoiceEnded | Ended)]
    assert [(type(end), end.choice, end.reason) for end in ends] == [
        (ChoiceEnded, 0, "stop"),
        (Ended, 1, "stop"),
    ]


def test_a_choice_nobody_asked_for_breaks_the_answer():
    table = new_table()
    stream = open_stream(table, n_choices=2)
    table.apply(m.TokenReady("r", 0, 1, 2))
    assert isinstance(table.take(stream)[0][-1], Broken)


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
    assert table.take(two)[0] == [Wrote("a", token_ids=(1,))]


@given(now=st.floats(0, 1000, allow_nan=False))
def test_deadlines_end_what_the_host_forgot(now):
    table = new_table()
    stream = open_stream(table, expires_at=100.0)
    told = table.expire(now)
    assert told == ([m.Cancel("r")] if now > 100.0 + GRACE_S else [])
    assert stream.over == bool(told)

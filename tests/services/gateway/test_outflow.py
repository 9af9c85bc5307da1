"""What leaves an Outflow is what went in, in order, within the credit; what is dropped is dropped whole and told.

Method: hypothesis plays a host that writes, a client that grants and a socket that is sometimes full.
"""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from common.wire import messages as m
from common.wire import public as p
from services.gateway.answers import Usage
from services.gateway.outflow import Outflow
from services.gateway.streams import Ended, Reading, Waiting, Wrote

END = Ended("!", "stop", Usage(3, 2), m.ReadReport(), token_ids=(9,))


def no_report(_last):
    return None


def drain(flow: Outflow, now: float = 0.0) -> list[p.AnyAnswer]:
    """Everything that may leave now."""
    out = []
    while (message := flow.peek()) is not None:
        flow.sent(now)
        out.append(message)
    return out


pieces = st.one_of(
    st.builds(Waiting, st.integers(0, 3)),
    st.builds(Reading, st.integers(0, 9), st.just(9)),
    st.builds(
        lambda text, choice: Wrote(text, choice, token_ids=(ord(text[0]),)),
        st.text(min_size=1),
        st.integers(0, 1),
    ),
)


@given(
    said=st.lists(st.lists(pieces, max_size=6), max_size=8),
    grants=st.lists(st.integers(1, 5)),
    full=st.randoms(),
)
def test_everything_leaves_once_in_order_and_within_the_credit(said, grants, full):
    flow, out, credit = Outflow("a", 2, 0.0), [], 2

    def send_some():
        while (message := flow.peek()) is not None and full.random() < 0.8:
            assert flow.peek() is message, "what was looked at does not change"
            flow.sent(0.0)
            out.append(message)

    for each in said:
        flow.push(each, 0.0, no_report)
        send_some()
        if grants:
            credit += grants[0]
            flow.grant(grants.pop(0))
        n_told = sum(x.n_tokens for x in out if isinstance(x, p.PieceWritten))
        assert n_told <= credit
    flow.push([END], 0.0, no_report)
    flow.grant(10_000)
    out += drain(flow)
    wrote = [piece for each in said for piece in each if isinstance(piece, Wrote)]
    told = [x for x in out if isinstance(x, p.PieceWritten)]
    for choice in (0, 1):
        rest = "!" if choice == 0 else ""
        text = "".join(x.text for x in told if x.choice == choice)
        assert text == "".join(piece.text for piece in wrote if piece.choice == choice) + rest
    assert sum(x.n_tokens for x in told) == len(wrote)
    assert [i for x in told for i in x.token_ids] == [i for piece in wrote for i in piece.token_ids] + [9]
    assert isinstance(out[-1], p.Finished) and flow.over and flow.n_tokens_waiting == 0


def test_without_credit_tokens_wait_and_leave_as_one_message():
    flow = Outflow("a", 1, 0.0)
    flow.push([Wrote("one "), Wrote("two "), Wrote("three")], 0.0, no_report)
    assert [(x.text, x.n_tokens) for x in drain(flow)] == [("one ", 1)]
    flow.grant(7)
    assert [(x.text, x.n_tokens) for x in drain(flow)] == [("two three", 2)]


def test_newer_progress_replaces_older_and_never_passes_a_token():
    flow = Outflow("a", 1, 0.0)
    flow.push([Reading(1, 9), Reading(2, 9)], 0.0, no_report)
    assert flow.peek() == p.ReadingPrompt(id="a", tokens_done=2, tokens_total=9)
    flow.push([Reading(3, 9), Wrote("x"), Reading(4, 9)], 0.0, no_report)
    kinds = [type(message).__name__ for message in drain(flow)]
    assert kinds == ["ReadingPrompt", "PieceWritten", "ReadingPrompt"]


def test_too_many_tokens_are_told():
    flow = Outflow("a", 1, 0.0, tokens_waiting_max=3)
    flow.push([Wrote("x")] * 3, 0.0, no_report)
    assert not flow.overfull
    flow.push([Wrote("x")], 0.0, no_report)
    assert flow.overfull


def test_a_flow_that_is_broken_off_drops_what_waits_and_says_its_last_word_once():
    flow = Outflow("a", 1, 0.0)
    flow.push([Wrote("x")] * 5, 0.0, no_report)
    drain(flow)
    flow.peek()
    assert flow.break_off(p.Cancelled(id="a"), 0.0) == 4
    flow.push([Wrote("late"), END], 0.0, no_report)
    flow.end(p.Cancelled(id="a"), 0.0)
    assert drain(flow) == [p.Cancelled(id="a")] and flow.over


def test_time_stands_still_only_while_something_waits():
    flow = Outflow("a", 1, 0.0)
    assert flow.stalled_s(100.0) == 0.0
    flow.push([Wrote("x"), Wrote("y")], 100.0, no_report)
    assert flow.stalled_s(103.0) == 3.0
    drain(flow, 104.0)
    assert flow.stalled_s(106.0) == 2.0, "the second token waits for credit"
    flow.grant(1)
    drain(flow, 106.0)
    assert flow.stalled_s(200.0) == 0.0

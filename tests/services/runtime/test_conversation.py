"""Aim: a receiver knows what arrived whole, what is missing and what belongs to an earlier life.

Method: two conversations talk through lists of frames; hypothesis loses, repeats and reorders them between the two.
"""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import LocalProtocolError
from common.wire import messages as m
from common.wire.routes import GENERATE, LIFE
from services.runtime.conversation import Conversation, new_epoch, peer_name


def pair(name="gateway", **kwargs):
    events = []
    asker = Conversation(GENERATE, "asker", name=name, **kwargs)
    owner = Conversation(GENERATE, "owner", name="mac", on_event=events.append)
    return asker, owner, events


def say(asker: Conversation, n: int = 1) -> list[list]:
    """Frames of the next n messages of an asker."""
    said = []
    for _ in range(n):
        said.append(asker.pack(m.AskStatus(), []))
        asker.sent()
    return said


def kinds(events) -> list[str]:
    return [event.kind for event in events]


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_lost_messages_are_counted_exactly(arrives):
    asker, owner, events = pair()
    said = say(asker, len(arrives))
    heard = [owner.open(frames, asker.identity) for frames, kept in zip(said, arrives, strict=True) if kept]
    assert all(received is not None for received in heard)
    inner = arrives[arrives.index(True) : len(arrives) - arrives[::-1].index(True)] if any(arrives) else []
    assert owner.dropped["lost"] == inner.count(False)
    assert sum(event.count for event in events if event.kind == "gap") == inner.count(False)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=30))
def test_a_number_is_taken_once_and_only_forwards(order):
    asker, owner, _ = pair()
    said = say(asker, 10)
    taken = [received.seq for i in order if (received := owner.open(said[i], asker.identity))]
    assert taken == sorted(set(taken))
    assert len(taken) + owner.dropped["replayed"] == len(order)


def test_a_restarted_asker_is_told_and_its_late_messages_are_dropped():
    first, owner, events = pair(epoch=1)
    second = Conversation(GENERATE, "asker", name="gateway", epoch=2)
    late = say(first, 2)
    assert owner.open(late[0], first.identity)
    assert owner.open(say(second)[0], second.identity)
    assert owner.open(late[1], first.identity) is None
    assert kinds(events) == ["joined", "restarted", "stale"]
    assert owner.dropped["stale"] == 1


def test_a_restarted_owner_is_told_and_must_count_from_one():
    events = []
    asker = Conversation(GENERATE, "asker", name="gateway", on_event=events.append)
    for epoch, skip in ((1, 0), (2, 1)):
        owner = Conversation(GENERATE, "owner", name="mac", epoch=epoch)
        for _ in range(skip):
            owner.sent(asker.identity)
        assert asker.open(owner.pack(m.Queued("r", 0), [], asker.identity))
    assert kinds(events) == ["joined", "restarted", "gap"]


def test_an_owner_takes_up_the_count_of_an_asker_that_was_there_before():
    asker, owner, events = pair()
    say(asker, 7)
    assert owner.open(say(asker)[0], asker.identity).seq == 8
    assert kinds(events) == ["joined"]


def test_processes_on_one_route_are_counted_apart():
    events = []
    launch = Conversation(LIFE, "owner", name="launch", on_event=events.append)
    for name in ("gateway", "mac"):
        asker = Conversation(LIFE, "asker", name=name)
        assert launch.open(asker.pack(m.Beat(name, 1, 0), []), asker.identity)
    assert [(event.kind, event.peer) for event in events] == [("joined", "gateway"), ("joined", "mac")]


def test_foreign_frames_are_counted_and_told():
    _, owner, events = pair()
    assert owner.open([b"hello"], b"\x00\x01") is None
    assert [(event.kind, event.peer) for event in events] == [("foreign", "0001")]


def test_a_message_that_did_not_leave_uses_up_no_number():
    asker, owner, _ = pair()
    asker.pack(m.AskStatus(), [])
    assert owner.open(say(asker)[0], asker.identity).seq == 1


@pytest.mark.parametrize("name", ["", "Gateway", "a-b", "x" * 65, "a b"])
def test_names_that_would_break_an_address_are_refused(name):
    with pytest.raises(LocalProtocolError, match="not a process name"):
        pair(name=name)


@given(st.binary(max_size=40))
def test_any_address_has_a_name(identity):
    assert peer_name(identity) in (identity.hex(), identity.decode("ascii", "replace").rpartition("-")[0])


def test_every_life_has_an_epoch_of_its_own():
    epochs = [new_epoch() for _ in range(500)]
    assert len(set(epochs)) == 500

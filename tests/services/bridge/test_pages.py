"""Aim: pages and queries cross the bridge whole, in order, and everything asked is answered once, whatever fails.

Method: a bridge in this process, a real worker process that holds pages only, this test as broker and mac. Answers are
compared, bit by bit, with what the host computes from the same file.
"""

from __future__ import annotations

import signal
import time

import numpy as np
import pytest

from common.attention.partial import fold_all
from common.errors import HashMismatchError, OutOfMemoryError, PositionError, StaleEpochError
from common.wire import held as h
from tests.device.page_end import Pages
from tests.device.worker_process import worker_process

from .conftest import BridgeThread
from .page_ends import AttentionEnd, BrokerEnd, JournalFile, page_ends


@pytest.fixture
def journal(tmp_path):
    return JournalFile(tmp_path / "journal", Pages(page_tokens=128, n_pages=6, group_pages=2))


@pytest.fixture
def worker(tmp_path):
    with worker_process(None, "--pages-only", folder=tmp_path) as worker:
        yield worker


@pytest.fixture
def bridge(run_dir, worker):
    bridge = BridgeThread(run_dir, worker.link, worker.control[1], answer_s_first=4.0, answer_s_min=1.0)
    yield bridge
    bridge.close()


@pytest.fixture
def ends(run_dir, bridge):
    with page_ends(run_dir) as (broker, mac):
        broker.watch()
        yield broker, mac


def same(parts, others) -> bool:
    return len(parts) == len(others) and all(
        getattr(a, name).tobytes() == getattr(b, name).tobytes()
        for a, b in zip(parts, others, strict=True)
        for name in "mlo"
    )


def eventually(holds) -> bool:
    """Whether it becomes true: what is counted is counted behind the answer."""
    until = time.monotonic() + 10
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()


@pytest.mark.parametrize("n_tokens", [1, 40])
def test_what_comes_back_is_what_the_host_would_have_computed(journal, bridge, ends, n_tokens):
    broker, mac = ends
    granted = broker.hold(journal)
    assert granted.tokens_max >= journal.pages.n_pages * journal.pages.page_tokens and granted.n_keys == 0
    broker.push_all(journal)
    for layer in journal.pages.layers:
        message, parts = mac.ask(journal, broker.epoch, layer, range(3), n_tokens)
        assert same(parts, journal.attended_here(layer, range(3), n_tokens))
        assert (message.n_keys, message.n_keys_frozen) == (3 * journal.form.group_tokens, 0)
        assert 0 < message.total_ms <= message.round_trip_ms
        _, folded = mac.ask(journal, broker.epoch, layer, range(3), n_tokens, per_group=False)
        assert same(folded, [fold_all(parts)])
    keys = 4 * 3 * journal.form.group_tokens
    assert eventually(lambda: bridge.value("held_keys_total", by="kernels") == keys)
    assert bridge.value("held_query_seconds_count") == 4
    assert bridge.value("held_pages_pushed_total") == len(journal.places)
    for direction, kind in (("out", "pages"), ("out", "queries"), ("in", "queries")):
        assert bridge.value("link_bytes_total", direction=direction, kind=kind) > 1000
    assert bridge.value("pages_up") == 1


def test_queries_go_between_the_pieces_of_pages(run_dir, bridge, tmp_path, ends):
    """40 pages of 2.2 MiB are under way when a query is asked: it does not wait for them."""
    broker, mac = ends
    pages = Pages(
        layers=(0,), n_head_kv=2, n_group=1, head_dim=128, page_tokens=2048, group_pages=1, n_pages=20
    )
    journal = JournalFile(tmp_path / "large", pages)
    broker.hold(journal)
    first = broker.push(journal.places[0, 0])
    assert isinstance(first, h.PagePushed)
    places = [journal.places[0, page] for page in range(1, 20)]
    for place in places:
        broker.ask(h.PushPage, epoch=broker.epoch, conversation=1, place=place)
    _, parts = mac.ask(journal, broker.epoch, 0, range(1))
    n_answered = 0
    while (received := broker.asker.recv(0)) is not None:
        n_answered += isinstance(received.message, h.PagePushed)
    assert len(parts) == 1 and n_answered < len(places), "it overtook"
    for _ in range(len(places) - n_answered):
        pushed = broker.told(h.PagePushed)
    assert pushed.n_keys == 20 * 2048


def test_cuts_and_orders_hold_on_to_their_place(journal, ends):
    broker, mac = ends
    broker.hold(journal)
    broker.push_all(journal)
    assert broker.cut(300).n_keys == 256, "whole pages stay"
    message, _ = mac.ask(journal, broker.epoch, 3, range(2))
    assert (message.code, message.cause) == (PositionError.code, "range")
    gap = broker.push(journal.places[3, 5])
    assert isinstance(gap, h.PushFailed) and gap.code == PositionError.code
    broker.push_all(journal, first_page=2)
    _, parts = mac.ask(journal, broker.epoch, 3, range(3))
    assert same(parts, journal.attended_here(3, range(3), 1))


def test_a_query_of_another_conversation_is_never_answered(journal, ends):
    broker, mac = ends
    broker.hold(journal)
    broker.push_all(journal)
    before = broker.epoch
    broker.hold(journal)
    assert broker.epoch > before
    message, _ = mac.ask(journal, before, 3, range(1))
    assert (message.code, message.cause) == (StaleEpochError.code, "stale_epoch")
    message, _ = mac.ask(journal, broker.epoch, 3, range(1), n_rows=7, q=np.zeros((2, 7, 32), np.float32))
    assert "the pages want [2, 3, 32]" in message.detail


def test_a_damaged_page_and_a_file_that_is_none_are_told(journal, ends):
    broker, _ = ends
    broker.hold(journal)
    place = journal.places[3, 0]
    with journal.path.open("r+b") as file:
        file.seek(place.offset + 100)
        file.write(b"\1\2\3")
    failed = broker.push(place)
    assert (failed.code, failed.cause) == (HashMismatchError.code, "damaged")
    for wrong in (
        h.PagePlace(3, 0, str(journal.path) + "-not", 0, 1),
        h.PagePlace(3, 0, "/dev/zero", 0, 1),
        h.PagePlace(3, 0, str(journal.path), 5, 1),
        h.PagePlace(3, 0, str(journal.path), 1 << 40, 1),
        h.PagePlace(99, 0, str(journal.path), 0, 1),
    ):
        assert isinstance(broker.push(wrong), h.PushFailed), wrong
    assert isinstance(broker.push(journal.places[7, 0]), h.PagePushed), "the link is unharmed"


def test_what_the_worker_has_no_room_for_is_refused(journal, ends):
    broker, _ = ends
    granted = broker.hold(journal, bytes_wanted=journal.form.image_bytes * 5)
    assert granted.tokens_max == journal.form.group_tokens, "whole groups of all layers"
    answers = [broker.push(journal.places[3, page]) for page in range(3)]
    assert isinstance(answers[1], h.PagePushed)
    assert (answers[2].code, answers[2].cause) == (OutOfMemoryError.code, "memory")
    assert "out of memory at 256 keys" in answers[2].detail


def test_a_killed_worker_fails_everything_at_once_and_another_one_takes_its_place(journal, run_dir, tmp_path):
    with worker_process(None, "--pages-only", folder=tmp_path) as worker:
        bridge = BridgeThread(run_dir, worker.link, worker.control[1], answer_s_first=4.0, answer_s_min=1.0)
        try:
            with page_ends(run_dir) as (broker, mac):
                broker.watch()
                broker.hold(journal)
                broker.push_all(journal)
                worker.signal(signal.SIGSTOP)
                tickets = {mac.send(journal, broker.epoch, 3, range(1)) for _ in range(3)}
                broker.ask(h.PushPage, epoch=broker.epoch, conversation=1, place=journal.places[3, 5])
                worker.process.kill()
                failed = [mac.heard()[0] for _ in range(3)]
                assert {message.ticket for message in failed} == tickets
                assert {message.cause for message in failed} == {"down"}
                assert broker.told(h.PushFailed).cause == "down"
                broker.told(h.PagesDown)
                message, _ = mac.ask(journal, broker.epoch, 3, range(1))
                assert message.cause == "down"
                assert bridge.value("held_failures_total", what="query", cause="down") == 4
                flags = ("--pages-only", "--control-port", str(worker.control[1]))
                with worker_process(None, *flags, folder=tmp_path):
                    broker.told(h.PagesUp)
                    broker.hold(journal)
                    broker.push_all(journal)
                    _, parts = mac.ask(journal, broker.epoch, 7, range(1, 3))
                    assert same(parts, journal.attended_here(7, range(1, 3), 1))
        finally:
            bridge.close()


def test_a_frozen_worker_is_late_and_its_pages_are_still_there_when_it_wakes(journal, bridge, worker, ends):
    broker, mac = ends
    broker.hold(journal, session=77)
    broker.push_all(journal)
    mac.ask(journal, broker.epoch, 3, range(1))
    worker.signal(signal.SIGSTOP)
    message, _ = mac.ask(journal, broker.epoch, 3, range(1))
    worker.signal(signal.SIGCONT)
    assert message.cause == "deadline"
    broker.told(h.PagesDown)
    broker.told(h.PagesUp)
    granted = broker.hold(journal, session=77)
    assert granted.n_keys == journal.pages.n_pages * journal.pages.page_tokens
    _, parts = mac.ask(journal, broker.epoch, 3, range(3))
    assert same(parts, journal.attended_here(3, range(3), 1))
    assert broker.hold(journal, session=78).n_keys == 0


def test_a_broker_that_is_started_anew_is_known_again(journal, run_dir, ends):
    broker, _ = ends
    broker.close()
    again = BrokerEnd(run_dir)
    try:
        again.watch()
        again.hold(journal)
    finally:
        again.close()


def test_without_a_broker_nothing_is_connected_and_queries_are_refused_at_once(
    journal, run_dir, bridge, worker
):
    mac = AttentionEnd(run_dir)
    try:
        message, _ = mac.ask(journal, 5, 3, range(1))
        assert message.cause == "down"
        time.sleep(0.6)
        assert bridge.value("pages_up") == 0
    finally:
        mac.close()

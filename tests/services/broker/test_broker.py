"""Aim: mac and bridge get from a broker what they need, whatever dies: pages kept, memory let go, workers filled anew.

Method: the real process behind real sockets; mac and bridge are small peers that speak the real messages.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from common.wire import held as h
from common.wire.routes import HOLD
from services.bench.scrape import scrape
from services.broker.chain import page_keys
from services.runtime.bus import BlockingAsker
from services.runtime.endpoints import route_endpoint
from tests.services.broker.house import IDS, WAIT_S, House
from tests.services.broker.pages import FORM, ids_of, image_of


@pytest.fixture
def house(tmp_path: Path) -> Iterator[House]:
    made = House(tmp_path)
    try:
        yield made
        made.close()
    finally:
        made.process.kill()
        made.process.wait()


def test_pages_are_kept_released_and_given_to_the_worker(house):
    opened = house.open()
    assert opened.places == () and opened.state_position == 0
    number = opened.conversation
    places = house.keep(number, range(8))
    house.ask(h.HostHolds(number, 0, 512))
    release = house.hear(h.ReleaseGroups)
    assert release.group_end == 1, "room for one group of 128 tokens ahead of need"
    house.ask(h.GroupsReleased(release.ticket, number, 1))
    placed = house.hear(h.Placed, lambda placed: placed.group_end == 4)
    assert (placed.conversation, placed.worker, placed.group_first) == (number, 0, 0)
    assert house.pushed == places, "in order, all layers of a page before the next"
    with Path(places[3].path).open("rb") as file:
        file.seek(places[3].offset)
        assert file.read(FORM.image_bytes) == b"".join(image_of(FORM.layers[1], 1))
    assert house.hear(h.Room).tokens_journal > 10_000


def test_a_release_that_crosses_a_cut_fails_nothing_and_the_next_is_asked_for(house):
    number = house.open().conversation
    house.keep(number, range(8))
    house.ask(h.HostHolds(number, 0, 512))
    crossing = house.hear(h.ReleaseGroups)
    house.ask(h.CutConversation(number, 320))
    house.ask(h.GroupsReleased(crossing.ticket, number, 1))
    house.keep(number, range(5, 8))
    house.ask(h.HostHolds(number, 1, 512))
    assert not [said for said in house.said if isinstance(said, h.HoldFailed)], (
        "its ticket is the broker's own"
    )
    house.keep(number, range(8, 10))
    house.ask(h.HostHolds(number, 1, 640))
    release = house.hear(h.ReleaseGroups)
    assert release.group_end == 2
    house.ask(h.GroupsReleased(release.ticket, number, 9))  # more than was asked for: refused, and asked anew
    house.ask(h.HostHolds(number, 1, 640))
    assert house.hear(h.ReleaseGroups).group_end == 2
    assert not [said for said in house.said if isinstance(said, h.HoldFailed)]


def test_a_worker_that_went_is_filled_again_and_a_cut_reaches_it(house):
    number = house.open().conversation
    places = house.keep(number, range(4))
    house.hear(h.Placed, lambda placed: placed.group_end == 2)
    house.turn_worker(False)
    assert house.hear(h.Placed, lambda placed: placed.group_end == 0).worker == 0
    house.pushed.clear()
    house.turn_worker(True)
    again = house.hear(h.Placed, lambda placed: placed.group_end == 2)
    assert again.epoch > 1 and house.pushed == places
    assert len(set(house.sessions)) == 1, "a worker that kept its pages may go on with them"
    house.ask(h.CutConversation(number, 200))
    assert house.hear(h.Placed, lambda placed: (placed.group_end, placed.epoch) == (1, again.epoch))
    house.wait_for_cut()
    assert house.cut.n_keys == 192


def test_a_worker_that_kept_its_pages_is_given_the_rest_only(house):
    number = house.open().conversation
    places = house.keep(number, range(4))
    house.hear(h.Placed, lambda placed: placed.group_end == 2)
    house.turn_worker(False)
    house.hear(h.Placed, lambda placed: placed.group_end == 0)
    house.pushed.clear()
    house.kept_keys = 128
    house.turn_worker(True)
    house.hear(h.Placed, lambda placed: placed.group_end == 2)
    assert house.pushed == places[4:]


def test_a_worker_out_of_memory_holds_what_it_granted(house):
    house.tokens_max = 128
    number = house.open().conversation
    places = house.keep(number, range(6))
    house.hear(h.Placed, lambda placed: placed.group_end == 1)
    house.ask(h.HostHolds(number, 0, 384))
    house.keep(number, range(6, 8))
    assert house.pushed == places[:4]


def test_a_quarantined_worker_holds_nothing_for_the_host(house):
    number = house.open().conversation
    house.keep(number, range(2))
    placed = house.hear(h.Placed, lambda placed: placed.group_end == 1)
    house.ask(h.WorkerErred(0, placed.epoch, "damaged", "a shadow check failed", quarantine=True))
    assert house.hear(h.Placed, lambda placed: placed.group_end == 0).worker == 0
    n_pushed = len(house.pushed)
    house.keep(number, range(2, 4))
    assert len(house.pushed) == n_pushed


def alter(place: h.PagePlace) -> None:
    """Another byte in the middle of a page."""
    with Path(place.path).open("r+b") as file:
        file.seek(place.offset + 99)
        byte = file.read(1)[0]
        file.seek(place.offset + 99)
        file.write(bytes([byte ^ 1]))


def mismatches(house) -> float:
    return scrape(house.metrics_port)["outrigger_page_hash_mismatch_total"]


def test_an_altered_page_is_found_told_counted_and_kept_anew(house):
    """By looking at all pages in turn; what the host still has it keeps again, elsewhere."""
    number = house.open().conversation
    places = house.keep(number, range(2))
    assert mismatches(house) == 0
    alter(places[1])
    lost = house.hear(h.PageLost)
    assert (lost.conversation, lost.layer, lost.page) == (number, places[1].layer, places[1].page)
    house.ticket += 1
    image, ids = image_of(lost.layer, lost.page), IDS[:64].copy()
    said = h.KeepPage(house.ticket, number, lost.layer, 0, FORM.page_tokens, FORM.key_bytes, FORM.value_bytes)
    house.ask(said, *image, ids)
    anew = house.hear(h.PageKept).place
    assert anew.offset != places[1].offset and anew.xxh3 == places[1].xxh3
    assert mismatches(house) == 1


def test_a_damaged_page_is_offered_no_more(house):
    """A push finds it at once; the conversation that is opened again ends before it."""
    house.damages = 1
    number = house.open().conversation
    places = house.keep(number, range(1))
    alter(places[0])
    house.keep(number, range(1, 8))
    lost = house.hear(h.PageLost)
    assert (lost.layer, lost.page) == (places[0].layer, 0)
    house.ask(h.CloseConversation(number))
    assert house.open().places == ()
    deadline = time.monotonic() + WAIT_S
    while not (n := mismatches(house)) and time.monotonic() < deadline:
        time.sleep(0.1)  # those of pushes are counted now and then
    assert n == 1


def test_a_worker_that_erred_once_is_named_again(house):
    number = house.open().conversation
    house.keep(number, range(2))
    placed = house.hear(h.Placed, lambda placed: placed.group_end == 1)
    house.ask(h.WorkerErred(0, placed.epoch, "deadline", "late"))
    assert house.hear(h.Placed) == placed


def test_a_conversation_comes_back_after_all_host_processes_were_killed(house):
    number = house.open().conversation
    places = house.keep(number, range(6))
    state = b"recurrent" * 500
    for position in (128, 256, 500):
        house.ask(h.KeepState(9, number, position, len(state)), state, IDS[:position].copy())
        house.hear(h.StateKept)
    house.kill()
    house.start()
    house.mac.close()
    house.mac = BlockingAsker(HOLD, route_endpoint(house.folder / "run", HOLD), name="mac")
    opened = house.open(IDS)
    assert list(opened.places) == places
    assert (opened.state_position, opened.state_bytes) == (256, len(state))
    with Path(opened.state_path).open("rb") as file:
        file.seek(opened.state_offset)
        assert file.read(opened.state_bytes) == state
    house.hear(h.Placed, lambda placed: placed.group_end == 3)
    assert house.pushed[-12:] == places


def test_a_broker_that_was_killed_says_that_it_knows_the_conversation_no_more(house):
    number = house.open().conversation
    places = house.keep(number, range(4))
    house.kill()
    house.start()
    house.ask(h.CutConversation(number, 64))  # has no ticket: nobody waits for an answer
    keys, values = image_of(1, 4)
    house.ask(
        h.KeepPage(5, number, 1, 4, 64, FORM.key_bytes, FORM.value_bytes), keys, values, IDS[256:320].copy()
    )
    assert house.hear(h.HoldFailed).cause == "unknown_conversation"
    assert list(house.open().places) == places


def test_what_cannot_be_kept_is_refused_and_changes_nothing(house):
    number = house.open(IDS[:0]).conversation
    keys, values = image_of(1, 0)
    ahead = h.KeepPage(5, number, 1, 3, 64, FORM.key_bytes, FORM.value_bytes)
    house.ask(ahead, keys, values, IDS[:64].copy())
    assert house.hear(h.HoldFailed).cause == "order"
    short = h.KeepPage(6, number, 1, 0, 64, 8, FORM.value_bytes)
    house.ask(short, keys[:8], values, IDS[:64].copy())
    assert house.hear(h.HoldFailed).cause == "form"
    assert len(house.keep(number, range(1))) == 2


def test_a_conversation_that_nearly_fills_the_journal_still_has_room_for_itself(tmp_path):
    house = House(tmp_path, OUTRIGGER_JOURNAL_MIB="16")
    try:
        house.worker_up = False
        ids = ids_of(64 * 280)
        number = house.open(ids).conversation
        house.hear(h.Room)
        house.keep(number, range(280), ids)
        house.ask(h.CloseConversation(number))
        assert len(house.open(ids).places) == 560
        assert house.hear(h.Room).tokens_journal > len(ids)
        house.close()
    finally:
        house.process.kill()
        house.process.wait()


def test_a_folder_that_was_removed_ends_the_broker_and_its_next_life_keeps_again(house):
    """What goes on into files without a name nobody could read, and the lock would be of nothing."""
    house.keep(house.open().conversation, range(4))
    shutil.rmtree(house.folder / "journal")
    assert house.process.wait(WAIT_S) == 1
    assert "was removed while the broker used it" in (house.folder / "log").read_text()
    house.start()
    opened = house.open()
    assert not opened.places
    places = house.keep(opened.conversation, range(4))
    assert list(house.open().places) == places and all(Path(place.path).exists() for place in places)


def test_pages_after_a_cut_are_of_the_new_tokens(house):
    number = house.open().conversation
    house.keep(number, range(4))
    edited = IDS.copy()
    edited[130:] += 1
    house.ask(h.CutConversation(number, 130))
    new = house.keep(number, range(2, 4), edited, seed=5)
    house.ask(h.CloseConversation(number))
    assert list(house.open(edited).places)[4:] == new
    assert len(house.open(IDS).places) == 4
    assert len(list(page_keys(FORM, IDS))) == 16

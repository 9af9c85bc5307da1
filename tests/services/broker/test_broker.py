"""Aim: mac and bridge get from a broker what they need, whatever dies: pages kept, memory let go, workers filled anew.

Method: the real process behind real sockets; mac and bridge are small peers that speak the real messages.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.errors import LinkDownError
from common.wire import held as h
from common.wire.routes import HOLD, PAGES
from services.bench.processes import free_port
from services.bench.scrape import scrape
from services.broker.chain import page_keys
from services.runtime.bus import BlockingAsker, BlockingOwner
from services.runtime.conversation import Received
from services.runtime.endpoints import route_endpoint
from tests.services.broker.pages import FORM, ids_of, image_of

WAIT_S = 20.0
LIMIT = 512
IDS = ids_of(64 * 16)


class House:
    """A run directory with a broker in it, a mac and a bridge."""

    def __init__(self, folder: Path, **environ: str) -> None:
        self.folder, self.environ = folder, environ
        (folder / "run").mkdir(mode=0o700)
        self.bridge = BlockingOwner(PAGES, route_endpoint(folder / "run", PAGES))
        self.mac = BlockingAsker(HOLD, route_endpoint(folder / "run", HOLD), name="mac")
        self.said: list[Any] = []
        self.pushed: list[h.PagePlace] = []
        self.epoch = 0
        self.ticket = 100
        self.metrics_port = free_port()
        self.start()

    def start(self) -> None:
        environ = {
            **os.environ,
            "OUTRIGGER_CONFIG": "",
            "OUTRIGGER_RUN_DIR": str(self.folder / "run"),
            "OUTRIGGER_JOURNAL_DIR": str(self.folder / "journal"),
            "OUTRIGGER_KV_HOST_TOKENS": str(LIMIT),
            "OUTRIGGER_BROKER_METRICS_PORT": str(self.metrics_port),
            **self.environ,
        }
        command = [sys.executable, "-m", "services.broker"]
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(command, env=environ, stdout=log, stderr=log)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def ask(self, message: Any, *arrays: Any) -> None:
        self.mac.send(message, *arrays, wait_s=WAIT_S)

    def hear(self, kind: type, fits: Callable[[Any], bool] = lambda message: True) -> Any:
        """The next message of this kind to mac; the bridge answers meanwhile."""
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            for index, message in enumerate(self.said):
                if isinstance(message, kind) and fits(message):
                    return self.said.pop(index)
            if received := self.mac.recv(0.02):
                self.said.append(received.message)
            self.serve_bridge()
        raise AssertionError(f"no {kind.__name__}; said {self.said}; {(self.folder / 'log').read_text()}")

    def turn_worker(self, up: bool) -> None:
        """The worker comes or goes; the broker is told at once."""
        self.worker_up = up
        said = h.PagesUp(1, "emulator", 1 << 30) if up else h.PagesDown(1, "down", "no cable")
        self.bridge.send(said, to=self.broker_peer)

    worker_up = True
    tokens_max = 1 << 20
    kept_keys = 0
    damages = 0
    """Pushes that find their page damaged."""
    cut: h.CutPages | None = None

    def serve_bridge(self) -> None:
        """As the bridge does, with a worker that takes everything up to tokens_max."""
        while received := self.bridge.recv(0):
            with suppress(LinkDownError):  # said by a broker that was killed
                self.answer(received)

    def answer(self, received: Received) -> None:
        match message := received.message:
            case h.WatchPages():
                self.broker_peer = received.peer
                up, down = h.PagesUp(1, "emulator", 1 << 30), h.PagesDown(1, "down", "no cable")
                self.bridge.send(up if self.worker_up else down, to=received.peer)
            case h.HoldPages():
                self.epoch += 1
                self.sessions = (*getattr(self, "sessions", ()), message.session)
                self.bridge.send(
                    h.PagesGranted(
                        message.ticket,
                        self.epoch,
                        message.conversation,
                        1 << 30,
                        self.tokens_max,
                        self.kept_keys,
                    ),
                    to=received.peer,
                )
            case h.PushPage() if self.damages:
                self.damages -= 1
                failed = h.PushFailed(message.ticket, message.epoch, 1, "damaged", "not what it was")
                self.bridge.send(failed, to=received.peer)
            case h.PushPage():
                self.pushed.append(message.place)
                keys = (message.place.page + 1) * FORM.page_tokens
                said = h.PagePushed(message.ticket, message.epoch, message.place.layer, keys, 0.001)
                self.bridge.send(said, to=received.peer)
            case h.CutPages():
                self.cut = message
                self.bridge.send(h.PagesCut(message.ticket, message.epoch, message.n_keys), to=received.peer)

    def wait_for_cut(self) -> None:
        deadline = time.monotonic() + WAIT_S
        while self.cut is None and time.monotonic() < deadline:
            self.serve_bridge()
            time.sleep(0.01)

    def open(self, ids: np.ndarray = IDS) -> h.ConversationOpened:
        self.ask(h.OpenConversation(1, FORM, len(ids)), ids)
        return self.hear(h.ConversationOpened)

    def keep(
        self, conversation: int, pages: range, ids: np.ndarray = IDS, seed: int = 0
    ) -> list[h.PagePlace]:
        places = []
        for page in pages:
            for layer in FORM.layers:
                self.ticket += 1
                keys, values = image_of(layer, page, seed)
                said = h.KeepPage(
                    self.ticket, conversation, layer, page, FORM.page_tokens, FORM.key_bytes, FORM.value_bytes
                )
                self.ask(said, keys, values, ids[page * 64 : (page + 1) * 64].copy())
                places.append(self.hear(h.PageKept, lambda kept: kept.ticket == self.ticket).place)
        return places

    def close(self) -> None:
        self.process.terminate()
        assert self.process.wait(timeout=WAIT_S) == 0, (self.folder / "log").read_text()
        self.mac.close()
        self.bridge.close()


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
    assert house.hear(h.Room, lambda room: room.tokens_workers > 0).tokens_journal > 10_000


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

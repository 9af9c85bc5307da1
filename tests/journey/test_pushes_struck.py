"""Aim: whoever is killed while pages are pushed, the worker has them all again, and never answers from half a page.

Method: real broker, bridge and worker, on a cable so slow that a push takes half a second; the test is the mac process.
Each is killed with SIGKILL in the middle of pushes. Whatever is said to be placed is attended at once, and compared,
bit by bit, with the same pages read by the host's own kernels.
"""

from __future__ import annotations

import time

import numpy as np
import pytest

from common.config import Settings, load_settings, to_environ
from common.wire import held as h
from common.wire.routes import HOLD
from services.bench.processes import Processes
from services.bench.query import settings_of
from services.runtime.bus import BlockingAsker
from services.runtime.endpoints import route_endpoint
from tests.device.page_end import Pages
from tests.services.bridge.page_ends import AttentionEnd, JournalFile

WAIT_S = 60.0
PAGES = Pages(
    layers=(0, 1), n_head_kv=2, n_group=1, head_dim=128, page_tokens=1024, group_pages=1, n_pages=12
)
IDS = np.arange(PAGES.n_pages * PAGES.page_tokens, dtype=np.int32)
MODULES = {"worker": "device.worker", "bridge": "services.bridge", "broker": "services.broker"}


class Mac:
    """The mac process's ends of routes "hold" and "attention", which can be killed, too."""

    def __init__(self, settings: Settings, source: JournalFile) -> None:
        self._settings, self._source = settings, source
        self.n_right = 0
        """Answers that were compared."""
        self._begin()

    def _begin(self) -> None:
        self._asker = BlockingAsker(
            HOLD, route_endpoint(self._settings.run_dir, HOLD), name="mac", on_event=lambda event: None
        )
        self._attention = AttentionEnd(self._settings.run_dir)

    def again(self) -> None:
        """Another life."""
        self.close()
        self._begin()

    def close(self) -> None:
        self._asker.close()
        self._attention.close()

    def open(self) -> int:
        """Opens the conversation; returns how many pages the journal has of it."""
        self._say(h.OpenConversation(1, self._source.form, len(IDS)), IDS)
        opened = self._hear(h.ConversationOpened)
        self.conversation = opened.conversation
        return len(opened.places)

    def keep(self) -> None:
        form, pt = self._source.form, PAGES.page_tokens
        for page in range(PAGES.n_pages):
            for layer in form.layers:
                said = h.KeepPage(2, self.conversation, layer, page, pt, form.key_bytes, form.value_bytes)
                image = PAGES.image(layer, page)
                ids = IDS[page * pt : (page + 1) * pt]
                self._say(said, image[: form.key_bytes], image[form.key_bytes :], ids)
                kept = self._hear(h.PageKept).place
                assert kept.xxh3 == self._source.places[layer, page].xxh3

    def placed(self, fits) -> h.Placed:
        """The next word of where pages are that `fits`; each word on the way there is taken by its word."""
        until = time.monotonic() + WAIT_S
        while time.monotonic() < until:
            placed = self._hear(h.Placed)
            assert placed.conversation == self.conversation
            if placed.group_end:
                self._attend(placed)
            if fits(placed):
                return placed
        raise AssertionError("what was wanted is not placed")

    def _attend(self, placed: h.Placed) -> None:
        """Asks for the newest group and the oldest; an answer is right, or there is none."""
        for group in {0, placed.group_end - 1}:
            message, parts = self._attention.ask(self._source, placed.epoch, 1, range(group, group + 1))
            if not isinstance(message, h.AttendFailed):
                (right,) = self._source.attended_here(1, range(group, group + 1), 1)
                assert all(
                    getattr(parts[0], name).tobytes() == getattr(right, name).tobytes() for name in "mlo"
                )
                self.n_right += 1

    def _say(self, message, *arrays) -> None:
        self._asker.send(message, *arrays, wait_s=WAIT_S)

    def _hear(self, kind):
        until = time.monotonic() + WAIT_S
        while (received := self._asker.recv(max(0.0, until - time.monotonic()))) is not None:
            assert not isinstance(received.message, h.HoldFailed), received.message
            if isinstance(received.message, kind):
                return received.message
        raise AssertionError(f"no {kind.__name__} came")


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    with Processes() as processes:
        settings = load_settings(None, to_environ(settings_of(processes)), {"worker_emulate": "usb2"})
        for name, module in MODULES.items():
            processes.start(name, module, settings)
        source = JournalFile(tmp_path_factory.mktemp("pages") / "source", PAGES)
        mac = Mac(settings, source)
        assert mac.open() == 0
        mac.keep()
        mac.placed(lambda placed: placed.group_end == PAGES.n_pages)
        yield processes, settings, mac
        mac.close()


@pytest.mark.parametrize("struck", ["worker", "bridge", "broker", "mac"])
def test_whoever_is_killed_while_pages_are_pushed_they_come_back(house, struck):
    processes, settings, mac = house
    processes.kill("worker")
    processes.start("worker", MODULES["worker"], settings)
    placed = mac.placed(lambda placed: 2 <= placed.group_end < PAGES.n_pages)
    assert placed.group_end < PAGES.n_pages, "pages are under way"
    if struck != "mac":
        processes.kill(struck)
        processes.start(struck, MODULES[struck], settings)
    if struck in ("mac", "broker"):
        mac.again()
        assert mac.open() == PAGES.n_pages * len(PAGES.layers), "the journal has every page"
    n_right = mac.n_right
    mac.placed(lambda placed: placed.group_end == PAGES.n_pages)
    assert mac.n_right > n_right, "what was placed after the strike was attended"
    processes.check()

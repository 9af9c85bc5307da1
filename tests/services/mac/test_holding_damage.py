"""Aim: pages that the journal has no more as they were kept are never attended: what they held is read again, and the
answer goes on with the tokens and log-probabilities it would have had.

Method: the real compute thread on tiny models with a limit of 512 tokens, and a broker in this process whose journal
file is altered while a prompt is read or an answer is written. Then what each part does that may notice.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from common.engine.engine import Engine
from common.model.synthetic import write_synthetic
from common.wire import held as h
from common.wire import messages as m
from services.bench.held_peers import PeerBroker, PeerWorker
from services.mac import holding as holding_module
from services.mac.compute import Compute
from services.mac.hold_setup import page_form
from services.mac.holding import Holding, PagesLostError
from services.mac.pairing import Pairing
from services.mac.requests import RequestQueue
from services.mac.tally import Tally
from services.mac.worker import LinkView, Worker
from tests.services.mac.test_holding import (
    DECODING,
    GEOMETRIES,
    LIMIT,
    N_CTX,
    SETTINGS,
    TOKENS,
    House,
    answer,
)

N_READ, N_WRITTEN, STRUCK_AT = 1500, 24, 9


@pytest.fixture(scope="module", params=list(GEOMETRIES))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("damage") / f"{request.param}.gguf"
    write_synthetic(GEOMETRIES[request.param], path, storage="q8_0")
    with Engine.load(path, n_ctx=N_CTX, decoding=DECODING, device="cpu") as engine:
        yield engine


class Desk:
    """A compute thread whose main sequence hands its pages to a broker; `strike` hears each event as it is told."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        engine.own.span(0, engine.spec.n_layer_full).truncate(0)
        self.file = folder / "journal"
        self.strike: Callable[[m.Message], None] = lambda _message: None
        self.workers: list[PeerWorker] = []
        self.broker = PeerBroker(self.file, LIMIT, self.workers)
        form = page_form(engine.spec, SETTINGS, "kernels")
        self.holding = Holding(engine.own, form, LIMIT, self.broker, [], Tally(), shadow_every=0)
        self.queue, self.events = RequestQueue(), queue.SimpleQueue()
        worker = Worker(0, rest_s=60.0)
        worker.link = LinkView("absent")
        reads = Pairing(engine, worker, None, Tally(), split_tokens_min=1 << 20, guarded=False)
        self.compute = Compute(engine, self.queue, worker, self.told, reads, holding=self.holding)
        self.thread = self.compute.start()

    def told(self, _request: object, message: m.Message) -> None:
        self.strike(message)
        self.events.put(message)

    def run(self, prompt: np.ndarray) -> list[tuple[int, float]]:
        """(token, its log-probability) of the answer."""
        sampling = m.Sampling(temperature=0.8, seed=7)
        ask = m.Generate("r", len(prompt), N_WRITTEN, sampling, (), 120.0, 200, top_logprobs=1)
        self.queue.submit(ask, prompt, b"peer")
        told: list[m.Message] = []
        while not told or not isinstance(told[-1], m.Finished | m.Failed):
            told.append(self.events.get(timeout=120))
        assert isinstance(told[-1], m.Finished), told[-1]
        return [(each.token_id, each.logprobs.logprob) for each in told if isinstance(each, m.TokenReady)]

    def close(self) -> None:
        self.queue.close()
        self.thread.join(timeout=60)
        self.holding.close()


def alter(place: h.PagePlace) -> None:
    """Other bytes in the middle of a page."""
    with open(place.path, "r+b") as file:
        file.seek(place.offset + 100)
        byte = file.read(1)
        file.seek(place.offset + 100)
        file.write(bytes([byte[0] ^ 0x40]))


@pytest.fixture(scope="module")
def right(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[int, float]]:
    """What is answered when nothing goes wrong."""
    desk = Desk(engine, tmp_path_factory.mktemp("right"))
    told = desk.run(TOKENS[:N_READ])
    assert desk.holding.group_released >= 6 and len(told) == N_WRITTEN
    desk.close()
    return told


def damages(desk: Desk, how: str) -> None:
    """Alter the oldest page in the journal's file; how: who notices."""
    place = desk.broker.place(desk.holding.form.layers[0], 0)
    alter(place)
    if how == "told by the broker":
        desk.broker.tell(h.PageLost(desk.holding.channel.conversation, place.layer, place.page))
    else:  # mapped again, so hashed: as after a start
        desk.holding._files.forget()


@pytest.mark.parametrize("how", ["told by the broker", "seen when mapped"])
@pytest.mark.parametrize("moment", ["in the read", "in the answer"])
def test_a_page_that_only_the_journal_had_is_read_again(
    engine: Engine, right: list[tuple[int, float]], tmp_path: Path, how: str, moment: str
) -> None:
    """The redone answer is the right one, each token told once; progress is not told twice."""
    desk, struck = Desk(engine, tmp_path), []

    def strike(message: m.Message) -> None:
        is_due = (
            isinstance(message, m.PrefillAdvanced) and message.tokens_done >= 1200
            if moment == "in the read"
            else isinstance(message, m.TokenReady) and message.index == STRUCK_AT
        )
        if is_due and not struck and desk.holding.group_released:
            struck.append(message)
            damages(desk, how)

    desk.strike = strike
    n_kept = desk.broker.n_pages
    assert desk.run(TOKENS[:N_READ]) == right
    assert struck, "nothing was altered"
    assert desk.broker.n_pages > n_kept
    desk.close()


def test_a_damaged_page_that_is_in_memory_is_kept_anew(engine: Engine, tmp_path: Path) -> None:
    house = House(engine, tmp_path)
    answer(house.sequence, 700)
    layer, page = house.holding.form.layers[0], 9
    assert page >= house.holding.memory.released
    before = house.holding.channel.places[layer, page]
    house.broker.tell(h.PageLost(house.holding.channel.conversation, layer, page))
    for _ in range(3):
        house.holding.step(house.sequence.n_canonical)
    assert house.holding.channel.places[layer, page] != before
    house.close()


def test_an_altered_page_is_found_by_looking(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No one tells: each look hashes one of the mapped pages, all of them in turn."""
    monkeypatch.setattr(holding_module, "LOOK_S", 0.0)
    house = House(engine, tmp_path)
    answer(house.sequence)
    layer = house.holding.form.layers[-1]
    n_mapped = house.holding.memory.released * len(house.holding.form.layers)
    house.holding._look_at_s = 0.0
    for _ in range(n_mapped):
        house.holding.step(house.sequence.n_canonical)
    alter(house.holding.channel.places[layer, 3])
    with pytest.raises(PagesLostError, match=r"page 3 in .* is not what was written there"):
        for _ in range(n_mapped):
            house.holding.step(house.sequence.n_canonical)
    house.close()


def test_a_worker_is_not_blamed_for_our_damage(engine: Engine, tmp_path: Path) -> None:
    """Shadow check: the worker attends what was kept, we an altered page; the page is lost, the worker stays."""
    worker = PeerWorker()
    house = House(engine, tmp_path, worker)
    answer(house.sequence)
    assert house.holding.n_remote > 0
    page = house.holding.n_remote * SETTINGS.group_pages - 1
    alter(house.holding.channel.places[house.holding.form.layers[0], page])
    worker.fault = "wrong"  # of the bytes that are in the file now, so that the two differ
    with pytest.raises(PagesLostError, match="is not what was written there"):
        house.sequence.decode(int(TOKENS[N_READ + N_WRITTEN]), N_READ + N_WRITTEN)
    assert house.holding.n_remote > 0, "it was given up for nothing"
    house.close()


@pytest.mark.parametrize("how", ["altered after it was mapped", "its file is gone"])
def test_a_new_broker_is_not_handed_damaged_pages_as_new(engine: Engine, tmp_path: Path, how: str) -> None:
    house = House(engine, tmp_path)
    answer(house.sequence)
    assert house.holding.memory.released
    place = house.holding.channel.places[house.holding.form.layers[0], 0]
    if how == "its file is gone":
        house.holding._files.forget()
        Path(place.path).unlink()
    else:
        alter(place)
    house.broker.restart()
    with pytest.raises(PagesLostError, match="page 0 of layer"):
        for _ in range(3):
            house.holding.step(house.sequence.n_canonical)
    house.close()


def test_a_recurrent_state_that_was_altered_is_not_taken_over(engine: Engine, tmp_path: Path) -> None:
    """The broker hashed it when it told of it; the file may change before it is read."""
    if "recurrent" not in engine.spec.kinds:
        return
    house = House(engine, tmp_path)
    answer(house.sequence)
    house.holding.look_up(TOKENS[:N_READ], N_READ - 1)
    opened = house.holding.channel.opened
    assert opened is not None and opened.state_position > 0
    with open(opened.state_path, "r+b") as file:
        file.seek(opened.state_offset + opened.state_bytes - 4)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(PagesLostError, match=r"recurrent state in .* is not what was kept"):
        house.holding.resume(TOKENS[:N_READ], opened.state_position)
    house.close()

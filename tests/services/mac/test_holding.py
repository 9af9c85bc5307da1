"""A sequence whose old pages left answers as one that keeps them, to the bit, whatever broker and workers do.

Tiny dense and hybrid models, pages of 64 keys, two pages a group, a limit of 512 tokens, a broker and workers in this
process that fail when told to. Compared: the logits of the prompt and of every decoded token.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from common.config import HostSettings
from common.engine.engine import Decoding, Engine
from common.errors import OutOfMemoryError, ServiceError
from common.model.geometry import Geometry
from common.model.synthetic import write_synthetic
from common.wire import held as h
from common.wire.message import Message
from services.bench.held_peers import FAULTS, PeerBroker, PeerWorker
from services.mac import holding as holding_module
from services.mac.hold_setup import decoding_of, host_limit, page_form
from services.mac.holding import Holding
from services.mac.plan import plan_read
from services.mac.read import Read
from services.mac.remote_pages import HeldWorker
from services.mac.sequence import HeldSequence
from services.mac.tally import Tally

N_CTX, LIMIT, N_READ, N_DECODED = 2048, 512, 1500, 24
SIZES = dict(n_embd=64, n_ff=64, n_head=4, n_head_kv=2, head_dim=32, n_vocab=100)
GEOMETRIES = {
    "llama": Geometry(arch="llama", n_layer=2, **SIZES),
    "qwen35": Geometry(n_layer=4, state_dim=16, **SIZES),
}
TOKENS = np.random.default_rng(3).integers(0, 100, N_CTX).astype(np.int32)
SETTINGS = HostSettings(n_ctx=N_CTX, page_tokens=64, group_pages=2, kv_host_tokens=LIMIT, n_threads=1)
DECODING = Decoding("paged", 64, 2, many_rows_from=LIMIT)
Before = Callable[[int], None]


@pytest.fixture(scope="module", params=list(GEOMETRIES))
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path = tmp_path_factory.mktemp("holding") / f"{request.param}.gguf"
    write_synthetic(GEOMETRIES[request.param], path, storage="q8_0")
    with Engine.load(path, n_ctx=N_CTX, decoding=DECODING, device="cpu") as engine:
        yield engine


@pytest.fixture(scope="module")
def kept(engine: Engine) -> np.ndarray:
    """What a sequence answers that keeps everything."""
    return answer(HeldSequence(engine))


class House:
    """A sequence with its broker and workers."""

    def __init__(
        self,
        engine: Engine,
        folder: Path,
        *workers: PeerWorker,
        shadow_every: int = 1,
        settings: HostSettings = SETTINGS,
    ) -> None:
        self.settings = settings
        engine.own.span(0, engine.spec.n_layer_full).truncate(0)
        self.workers = list(workers)
        self.broker = PeerBroker(folder / "journal", settings.kv_host_tokens, self.workers)
        self.tally = Tally()
        self.sequence, self.holding = self.hold(engine, shadow_every)

    def hold(self, engine: Engine, shadow_every: int = 1) -> tuple[HeldSequence, Holding]:
        form, limit = page_form(engine.spec, self.settings, "kernels"), self.settings.kv_host_tokens
        ends = [HeldWorker(number, worker) for number, worker in enumerate(self.workers)]
        holding = Holding(engine.own, form, limit, self.broker, ends, self.tally, shadow_every=shadow_every)
        sequence = HeldSequence(engine)
        sequence.holding = holding
        return sequence, holding

    def value(self, name: str) -> float | None:
        return self.tally.metrics.registry.get_sample_value(f"outrigger_{name}")

    def close(self) -> None:
        self.sequence.forget()
        assert self.value("journal_lag_pages") == 0
        self.holding.close()
        for worker in self.workers:
            worker.end()


def answer(
    sequence: HeldSequence,
    n_read: int = N_READ,
    before: Before = lambda _position: None,
    prompt: np.ndarray = TOKENS,
    n_decoded: int = N_DECODED,
) -> np.ndarray:
    """Logits of the prompt's last token and of those after it; `before` is told each position."""
    holding = sequence.holding
    sequence.resume(prompt[:n_read])
    start = sequence.begin(prompt[:n_read])
    read = Read(sequence, prompt[:n_read], plan_read(start, n_read, worker="off", split_tokens_min=2), None)
    while read.logits is None:
        before(read.tokens_done)
        step(holding, sequence, 512, lambda: read.advance(0.0))
    logits = [read.logits]
    for position in range(n_read, n_read + n_decoded):
        before(position)
        step(holding, sequence, 1, lambda at=position: logits.append(sequence.decode(int(prompt[at]), at)))
    return np.stack(logits)


def step(holding: Holding | None, sequence: HeldSequence, n: int, act: Callable[[], None]) -> None:
    if holding is None:
        act()
        return
    while not holding.has_room(n):
        holding.wait(0.01, sequence.n_canonical)
    act()
    holding.step(sequence.n_canonical)


@pytest.mark.parametrize("n_workers", [0, 1, 2])
def test_pages_that_left_change_no_bit(
    engine: Engine, kept: np.ndarray, tmp_path: Path, n_workers: int
) -> None:
    workers = [PeerWorker(n_groups_max=3) for _ in range(n_workers)]
    house = House(engine, tmp_path, *workers)
    assert np.array_equal(answer(house.sequence), kept)
    in_memory = house.holding.n_tokens - house.holding.group_released * 128
    assert house.holding.group_released > 6 and in_memory <= LIMIT
    assert house.holding.n_remote == 3 * n_workers and all(worker.n_answers for worker in workers)
    house.close()


def test_a_group_larger_than_the_limit_stays_whole_and_older_ones_leave(tmp_path: Path) -> None:
    settings = HostSettings(n_ctx=N_CTX, page_tokens=64, group_pages=16, kv_host_tokens=LIMIT, n_threads=1)
    path = tmp_path / "model.gguf"
    write_synthetic(GEOMETRIES["llama"], path, storage="q8_0")
    decoding = Decoding("paged", 64, 16, many_rows_from=LIMIT)
    with Engine.load(path, n_ctx=N_CTX, decoding=decoding, device="cpu") as engine:
        right = answer(HeldSequence(engine))
        house = House(engine, tmp_path, PeerWorker(), settings=settings)
        assert np.array_equal(answer(house.sequence), right)
        assert house.holding.group_released == 1 and house.workers[0].n_answers
        house.close()


@pytest.mark.parametrize("n_workers", [0, 1])
def test_conversations_take_turns_and_none_gets_the_pages_of_another(
    engine: Engine, kept: np.ndarray, tmp_path: Path, n_workers: int
) -> None:
    """Pages of the one are mapped and grouped when the other is asked, which comes from the journal, too."""
    other = TOKENS[::-1].copy()
    right = {False: kept, True: answer(HeldSequence(engine), prompt=other)}
    house = House(engine, tmp_path, *(PeerWorker() for _ in range(n_workers)), shadow_every=3)
    for is_other in (False, True, False, True):
        found = answer(house.sequence, prompt=other if is_other else TOKENS)
        assert np.array_equal(found, right[is_other])
    assert house.holding.channel.opened is not None and house.holding.channel.opened.places
    breaches = house.tally.metrics.registry.get_sample_value(
        "outrigger_shadow_checks_total", {"outcome": "breach"}
    )
    assert breaches == 0
    house.close()


def test_what_the_broker_cannot_be_told_is_told_later(
    engine: Engine, kept: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every other word finds the pipe full. Lost, each would have a sequence wait for memory that is never released,
    or a conversation keep its files though it is over."""
    monkeypatch.setattr("services.mac.hold_channel.RETRY_S", 0.01)
    house = House(engine, tmp_path)
    tried: Counter[type] = Counter()
    said: Counter[type] = Counter()
    send = house.broker.send

    def often_full(message: Message, *arrays: object, wait_s: float = 0.0) -> None:
        kind = type(message)
        tried[kind] += 1
        if kind in (h.HostHolds, h.CloseConversation, h.WorkerErred) and tried[kind] % 2:
            raise ServiceError("it does not read")
        said[kind] += 1
        send(message, *arrays, wait_s=wait_s)

    monkeypatch.setattr(house.broker, "send", often_full)
    assert np.array_equal(answer(house.sequence), kept)
    assert house.holding.group_released > 6
    said.clear()
    tried.clear()
    house.holding.channel.close()
    assert not said[h.CloseConversation]
    until_s = time.monotonic() + 10
    while not said[h.CloseConversation] and time.monotonic() < until_s:
        house.holding.channel.hear(0.05)
        time.sleep(0.05)
    assert said[h.CloseConversation] == 1
    house.close()


def test_what_is_handed_over_is_a_copy(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A page waits in a pipe while its memory may become another sequence's."""
    house, images = House(engine, tmp_path), []
    send = house.broker.send

    def remembering(message: Message, *arrays: object, wait_s: float = 0.0) -> None:
        if isinstance(message, h.KeepPage):
            images.append(arrays[:2])
        send(message, *arrays, wait_s=wait_s)

    monkeypatch.setattr(house.broker, "send", remembering)
    answer(house.sequence, n_read=700, n_decoded=1)
    memory = [part for layer in house.holding.form.layers for part in house.holding.memory.image(layer, 9)]
    assert images and not any(
        np.shares_memory(part, other) for pair in images for part in pair for other in memory
    )
    house.close()


@pytest.mark.parametrize("fault", FAULTS)
def test_a_worker_that_fails_changes_no_bit(
    engine: Engine, kept: np.ndarray, tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("services.mac.remote_pages.ANSWER_S_FIRST", 0.3)
    worker = PeerWorker()
    house = House(engine, tmp_path, worker)
    fell_back: list[str] = []
    monkeypatch.setattr(house.tally, "pages_fell_back", fell_back.append)

    def before(position: int) -> None:
        if position in (1024, N_READ + 3):
            worker.fault = fault
        elif position in (N_READ, N_READ + 10):
            house.broker.place_again()

    assert np.array_equal(answer(house.sequence, before=before), kept)
    assert len(fell_back) == 2 and worker.n_answers > 5
    house.close()


def test_a_broker_that_is_lost_or_restarted_changes_no_bit(
    engine: Engine, kept: np.ndarray, tmp_path: Path
) -> None:
    house = House(engine, tmp_path, PeerWorker())

    def before(position: int) -> None:
        if position == 1024:
            house.broker.restart()
        elif position == N_READ + 2:
            house.broker.up = False
        elif position == N_READ + 8:
            house.broker.up = True

    assert np.array_equal(answer(house.sequence, before=before), kept)
    house.close()


def test_a_journal_that_takes_nothing_ends_the_request_by_name(
    engine: Engine, kept: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(holding_module, "FULL_S", 0.1)
    house = House(engine, tmp_path)
    house.broker.takes = False
    with pytest.raises(OutOfMemoryError, match="journal_full"):
        answer(house.sequence)
    house.broker.takes = True
    house.sequence.forget()
    monkeypatch.setattr(holding_module, "FULL_S", 30.0)
    assert np.array_equal(answer(house.sequence), kept)
    house.close()


def test_a_full_page_is_told_and_when_the_newest_token_is_behind_it(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group goes only once the newest token is behind it; of a limit of one group, nothing else would say that."""
    house, told = House(engine, tmp_path), list[int]()
    holds = house.holding.channel.holds
    monkeypatch.setattr(house.holding.channel, "holds", lambda g, n: told.append(n) or holds(g, n))
    answer(house.sequence, n_read=1530, n_decoded=12)
    assert {1536, 1537} <= set(told) and not {1535, 1539} & set(told)
    house.close()


def test_going_back_recalls_what_is_needed(engine: Engine, kept: np.ndarray, tmp_path: Path) -> None:
    """The same prompt again, another one that parts above the limit, and one that parts below it."""
    house = House(engine, tmp_path, PeerWorker())
    assert np.array_equal(answer(house.sequence), kept)
    assert np.array_equal(answer(house.sequence), kept)
    assert house.value("pages_recalled_total") == 0
    for parts_at in (1100, 300):
        other = TOKENS.copy()
        other[parts_at:] = other[parts_at:][::-1]
        theirs = answer(house.sequence, prompt=other)
        assert (house.value("pages_recalled_total") > 0) == (parts_at < LIMIT)
        house.close()
        assert np.array_equal(theirs, answer(HeldSequence(engine), prompt=other))
        house = House(engine, tmp_path, PeerWorker())
        assert np.array_equal(answer(house.sequence), kept)
    house.close()


def test_an_answer_is_made_canonical_past_the_limit(engine: Engine, tmp_path: Path) -> None:
    def talk(sequence: HeldSequence) -> np.ndarray:
        answer(sequence, n_read=1000, n_decoded=100)
        sequence.answered(TOKENS[1000:1100])
        while sequence.n_provisional:
            step(sequence.holding, sequence, 256, sequence.advance_canonical)
        assert sequence.reusable(TOKENS[:N_READ]) >= 768
        return answer(sequence)

    house = House(engine, tmp_path, PeerWorker())
    ours = talk(house.sequence)
    house.close()
    assert np.array_equal(ours, talk(HeldSequence(engine)))


@pytest.mark.parametrize("broker_is_late", [False, True])
def test_a_new_process_goes_on_from_the_journal(
    engine: Engine, kept: np.ndarray, tmp_path: Path, broker_is_late: bool
) -> None:
    house = House(engine, tmp_path, PeerWorker())
    answer(house.sequence)
    house.holding.close()
    engine.set_sources(None)
    engine.own.span(0, engine.spec.n_layer_full).truncate(0)
    house.broker.restart()
    if broker_is_late:  # it was killed, too, and is awaited
        house.broker.up = False
        threading.Timer(0.5, setattr, (house.broker, "up", True)).start()
    house.sequence, house.holding = house.hold(engine)
    starts: list[int] = []
    assert np.array_equal(answer(house.sequence, before=starts.append), kept)
    assert starts[0] >= 1024
    house.close()


def test_prompts_are_not_refused_before_a_broker_could_say_what_it_has_room_for(
    engine: Engine, tmp_path: Path
) -> None:
    house, now = House(engine, tmp_path), [0.0]
    house.broker.up = False
    form = house.holding.form
    house.holding.close()
    holding = Holding(engine.own, form, LIMIT, house.broker, [], house.tally, clock=lambda: now[0])
    assert holding.n_ctx == N_CTX
    now[0] = holding_module.ROOM_S_MAX
    assert holding.n_ctx == LIMIT, "there is none"
    holding.close()


def test_the_limit_follows_from_settings_and_model(engine: Engine) -> None:
    spec, form = engine.spec, page_form(engine.spec, SETTINGS, "kernels")
    assert host_limit(spec, SETTINGS) == LIMIT
    tight = HostSettings(
        n_ctx=N_CTX, page_tokens=64, group_pages=2, kv_host_tokens=1024, kv_host_bytes=10 * form.image_bytes
    )
    assert (
        host_limit(spec, tight) == 10 * 64 // len(form.layers) // 256 * 256 or host_limit(spec, tight) == 256
    )
    assert decoding_of(spec, SETTINGS).many_rows_from == LIMIT
    assert decoding_of(spec, HostSettings(n_ctx=LIMIT, kv_host_tokens=LIMIT, n_threads=1)).path == "fused"

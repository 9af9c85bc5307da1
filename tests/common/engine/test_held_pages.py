"""Where old pages lie changes no bit: in memory, released and mapped from files, recalled, attended by somebody else.

Tiny models, pages of 64 keys, ubatches of 64 rows: reads past a limit go by pages, one ubatch at a time or staggered;
logits of all positions are compared for equality with those of an engine that keeps everything.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xxhash

from common.attention.partial import PartialAttention
from common.engine.engine import Decoding, Engine
from common.engine.kv_source import KvSource, PageQuery
from common.engine.local_pages import LocalPages
from common.engine.mapped_pages import MappedPages
from common.engine.reference import ReferenceEngine
from common.errors import EngineError, HashMismatchError
from common.model.geometry import Geometry
from common.model.synthetic import write_synthetic
from common.state.page_memory import PageMemory

N_CTX, LIMIT, N_UBATCH, N_READ, N_DECODED = 1024, 256, 64, 500, 40
SIZES = dict(n_embd=64, n_ff=64, n_head=4, n_head_kv=2, head_dim=32, n_vocab=100)
GEOMETRIES = {
    "llama": Geometry(arch="llama", n_layer=3, **SIZES),
    "qwen35": Geometry(n_layer=8, state_dim=16, **SIZES),
    "gemma3": Geometry(arch="gemma3", n_layer=6, interval=3, window=40, **SIZES),
}
TOKENS = np.random.default_rng(9).integers(0, 100, N_CTX).astype(np.int32)


def load(model: Path, **changed: object) -> Engine:
    decoding = Decoding("paged", page_tokens=64, group_pages=2, many_rows_from=LIMIT, **changed)
    return Engine.load(model, n_ctx=N_CTX, n_ubatch=N_UBATCH, decoding=decoding, device="cpu")


@pytest.fixture(scope="module", params=list(GEOMETRIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("held") / f"{request.param}.gguf"
    write_synthetic(GEOMETRIES[request.param], path, storage="q8_0")
    return path


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    with load(model) as engine:
        yield engine


@pytest.fixture(scope="module")
def kept(engine: Engine) -> np.ndarray:
    """Logits with all pages in memory, one ubatch after the other."""
    return run(engine, 0, N_READ + N_DECODED)


def run(
    engine: Engine, start: int, end: int, *, pairs: bool = False, before=lambda _position: None
) -> np.ndarray:
    """Logits of the last row of each step: a read up to N_READ, then single tokens. before: told each position."""
    span, logits, position = engine.span(0, engine.spec.n_layer_full), [], start
    if start == 0:
        engine.set_sources(None)
        span.truncate(0)
    while position < end:
        before(position)
        n = N_UBATCH * (1 + (pairs and span.runs_pairs(position)))
        n = min(n, N_READ - position) if position < N_READ else 1
        step = span.run_pair if n > N_UBATCH else span.run
        logits.append(step(TOKENS[position : position + n], position, "last")[-1])
        position += n
    return np.stack(logits)


@dataclass(frozen=True)
class At:
    path: str
    offset: int
    xxh3: int


class Journal:
    """Full pages in one file."""

    def __init__(self, path: Path, memory: PageMemory) -> None:
        self._path, self._memory = path, memory
        self.places: dict[tuple[int, int], At] = {}

    def keep(self, layer: int, page: int) -> None:
        offset = (
            -(-(self._path.stat().st_size if self._path.exists() else 0) // mmap.PAGESIZE) * mmap.PAGESIZE
        )
        image = np.concatenate(self._memory.image(layer, page))
        with open(self._path, "r+b" if self._path.exists() else "wb") as file:
            file.seek(offset)
            file.write(image)
        self.places[layer, page] = At(str(self._path), offset, xxhash.xxh3_64_intdigest(image))

    def at(self, layer: int, page: int) -> At:
        return self.places[layer, page]


class Elsewhere:
    """A source of the released groups."""

    def __init__(self, pages: MappedPages, memory: PageMemory) -> None:
        self._pages, self._memory = pages, memory

    def start_attend(self, query: PageQuery) -> None:
        self._query = query

    def wait_attend(self) -> list[PartialAttention]:
        return self._pages.attend(self._query, range(self._memory.released // 2))


class Holding:
    """Keeps every full page in a journal and releases all groups but the newest two."""

    def __init__(self, engine: Engine, folder: Path) -> None:
        self.memory = PageMemory(engine.state)
        self.journal = Journal(folder / "journal", self.memory)
        self.pages = engine.own.pages_elsewhere(self.journal.at)
        self._n_kept = 0
        self._engine = engine

    def __call__(self, position: int) -> None:
        if position == 0:
            self._engine.set_sources(self._choose)
        for page in range(self._n_kept, self.memory.n_full):
            for layer in self.memory.layers:
                self.journal.keep(layer, page)
        self._n_kept = self.memory.n_full
        if position >= LIMIT:
            self.memory.release(max(0, self.memory.n_full // 2 - 2) * 2)

    def _choose(self, local: LocalPages) -> list[KvSource]:
        local.first_page = self.memory.released
        return [Elsewhere(self.pages, self.memory), local] if self.memory.released else [local]


def test_reads_past_the_limit_are_attention_over_all_keys(model: Path, kept: np.ndarray) -> None:
    reference = run_plainly(ReferenceEngine(model))
    with Engine.load(model, n_ctx=N_CTX, n_ubatch=N_UBATCH, device="cpu") as fused:
        allowed = np.std(run_plainly(fused) - reference)
    assert np.std(kept - reference) < 1.2 * allowed and allowed < 0.1 * np.std(reference)


def run_plainly(engine: Engine | ReferenceEngine) -> np.ndarray:
    span, logits, position = engine.span(0, engine.spec.n_layer_full), [], 0
    while position < N_READ + N_DECODED:
        n = min(N_UBATCH, N_READ - position) if position < N_READ else 1
        logits.append(span.run(TOKENS[position : position + n], position, "last")[-1])
        position += n
    return np.stack(logits)


def test_staggered_ubatches_have_the_same_bits(engine: Engine, kept: np.ndarray) -> None:
    staggered = run(engine, 0, N_READ + N_DECODED, pairs=True)
    singles = [0, 1, 2, 3, 5, 7, *range(8, 8 + N_DECODED)]  # the last ubatch of each pair
    assert np.array_equal(staggered, kept[singles])


@pytest.mark.parametrize("pairs", [False, True])
def test_released_pages_change_no_bit(engine: Engine, kept: np.ndarray, tmp_path: Path, pairs: bool) -> None:
    holding = Holding(engine, tmp_path)
    logits = run_held(engine, holding, pairs)
    assert np.array_equal(logits, kept if not pairs else kept[[0, 1, 2, 3, 5, 7, *range(8, 8 + N_DECODED)]])
    assert holding.memory.released == 4
    holding.pages.close()


def test_an_engine_that_does_not_stagger_runs_one_ubatch_at_a_time(model: Path, kept: np.ndarray) -> None:
    with load(model, stagger=False) as engine:
        told: list[tuple[int, float]] = []
        engine.watch_attention(lambda n_tokens, seconds: told.append((n_tokens, seconds)))
        assert np.array_equal(run(engine, 0, N_READ + 1, pairs=True), kept[:9])
    n_layer = sum(engine.spec.kind(layer) == "attention" for layer in engine.spec.layers)
    past_the_limit = [N_UBATCH] * 3 + [N_READ % N_UBATCH, 1]
    assert [n for n, _ in told] == [n for n in past_the_limit for _ in range(n_layer)]
    assert all(seconds > 0 for _, seconds in told)


def run_held(engine: Engine, holding: Holding, pairs: bool = False) -> np.ndarray:
    return run(engine, 0, N_READ + N_DECODED, pairs=pairs, before=holding)


def test_recalled_pages_change_no_bit(engine: Engine, kept: np.ndarray, tmp_path: Path) -> None:
    """Going back below the limit needs all pages; between limit and border, those of the group gone back to."""
    holding = Holding(engine, tmp_path)
    run_held(engine, holding)
    span, memory = engine.span(0, engine.spec.n_layer_full), holding.memory
    if any(engine.spec.kind(layer) == "recurrent" for layer in engine.spec.layers):
        with pytest.raises(EngineError):
            span.truncate(N_UBATCH)
        holding.pages.close()
        return
    for back_to in (4 * N_UBATCH, 3 * N_UBATCH):
        before = memory.released
        if back_to < memory.released * 64:
            with pytest.raises(EngineError, match="recall"):
                span.truncate(back_to)
        memory.recall(0 if back_to < LIMIT else back_to // 128 * 2, holding.pages.image)
        assert memory.released <= before
        span.truncate(back_to)
        assert np.array_equal(run(engine, back_to, N_READ + N_DECODED), kept[back_to // N_UBATCH :])
        holding._n_kept = back_to // 64
        holding.pages.forget(back_to // 64)
        holding(N_READ)
    holding.pages.close()


def test_a_new_process_goes_on_from_the_pages(
    model: Path, engine: Engine, kept: np.ndarray, tmp_path: Path
) -> None:
    if "gemma3" in str(model):
        pytest.skip("its sliding layers' rows are not in the pages")
    holding, n, states = Holding(engine, tmp_path), 7 * N_UBATCH, []

    def before(position: int) -> None:
        holding(position)
        if position == n:
            states.extend(engine.span(0, engine.spec.n_layer_full).export_rows(0, 0, kv=False, state=True))

    run(engine, 0, N_READ + N_DECODED, before=before)
    with load(model) as fresh:
        memory = PageMemory(fresh.state)
        pages = fresh.own.pages_elsewhere(holding.journal.at)
        memory.resume(n // 64 * 64, 4, pages.image)
        span = fresh.span(0, fresh.spec.n_layer_full)
        span.import_rows(states, n)

        def choose(local: LocalPages) -> list[KvSource]:
            local.first_page = memory.released
            return [Elsewhere(pages, memory), local]

        fresh.set_sources(choose)
        assert np.array_equal(run(fresh, n, N_READ + N_DECODED), kept[7:])
        pages.close()
    holding.pages.close()


def test_what_is_not_there_is_refused_by_name(engine: Engine, tmp_path: Path) -> None:
    holding = Holding(engine, tmp_path)
    run_held(engine, holding)
    with pytest.raises(EngineError, match="full pages"):
        holding.memory.image(holding.memory.layers[0], 0)
    engine.set_sources(None)
    with pytest.raises(EngineError, match="released"):
        run(engine, N_READ + N_DECODED, N_READ + N_DECODED + 1)
    holding.pages.close()
    path = Path(holding.journal.at(holding.memory.layers[0], 0).path)
    with open(path, "r+b") as file:
        file.write(b"\x01\x02")
    with pytest.raises(HashMismatchError):
        holding.pages.image(holding.memory.layers[0], 0)

"""`outrigger verify --held`: a sequence whose old pages left the host answers, to the bit, as one that keeps them all.

One process: the host's own parts (reads, staggered ubatches, decode, holding) beside a broker and workers that journal
to a file and attend on kernels of their own. Lengths at the borders of pages and groups, none, one and two workers,
every fault at every moment, going back, a new process; token by token, all logits. Then the whole system, with real
processes killed and frozen (verify_held_processes.py), and closeness to stock on natural text. Called by
services.cli.verify.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from common.config import HostSettings
from common.engine.closeness import Closeness, teacher_forced
from common.engine.engine import Decoding, Engine
from common.ggml.stock import StockContext, StockModel
from common.model.embedded import embedded_model
from common.model.synthetic import ensure_preset
from services.bench.held_peers import FAULTS, Fault, PeerBroker, PeerWorker
from services.bench.report import Report
from services.bench.texts import natural_tokens
from services.bench.verify_held_processes import ProcessCounts, verify_processes
from services.mac.hold_setup import page_form
from services.mac.holding import Holding
from services.mac.plan import plan_read
from services.mac.read import Read
from services.mac.remote_pages import HeldWorker
from services.mac.sequence import HeldSequence
from services.mac.tally import Tally

LIMIT, PAGE_TOKENS, GROUP_PAGES, N_THREADS = 1024, 256, 2, 1
N_CTX, N_CTX_QUICK = 8192, 4096
BORDERS = (2047, 2048, 2049, 2303, 2304, 2305)
"""Lengths of prompts at a group's border, and at one of a page within a group."""
N_DECODED = 24
N_STRUCK = 2040
"""Length of the prompt whose read and answer are struck: its answer crosses a group's border."""
MOMENTS = {
    "in the first pair past the limit": LIMIT + 512,
    "in the last ubatch": N_STRUCK - 504,
    "at the first token": N_STRUCK,
    "at a group's border in the answer": 2048,
    "late in the answer": N_STRUCK + N_DECODED - 2,
}
Before = Callable[[int], None]


@dataclass
class HeldTotals:
    """What was compared: logits of whole rows, equal to the last bit or not."""

    compared: int = 0
    equal: int = 0
    remote_answers: int = 0
    fallbacks: int = 0
    shadow_checks: int = 0
    closeness: Closeness = field(default_factory=Closeness)
    processes: list[ProcessCounts] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    @property
    def tokens_compared(self) -> int:
        """By the whole system."""
        return sum(each.compared for each in self.processes)

    @property
    def tokens_equal(self) -> int:
        return sum(each.equal for each in self.processes)

    @property
    def problems(self) -> list[str]:
        """What went wrong in the whole system; sentences."""
        return [text for each in self.processes for text in each.problems]

    def compare(self, what: str, kept: np.ndarray, held: np.ndarray) -> int:
        """Counts the rows f32 [n, n_vocab] that are the same; returns how many."""
        if not np.isfinite(kept).all():
            self.differences.append(f"{what}: the logits of the sequence that keeps all are not numbers")
        same = sum(np.array_equal(a, b) for a, b in zip(kept, held, strict=True))
        self.compared += len(kept)
        self.equal += same
        if same < len(kept):
            self.differences.append(f"{what}: {same} of {len(kept)} rows of logits equal")
        return same

    @property
    def passed(self) -> bool:
        """Everything was equal, nobody told of a problem, and close to stock as stock is to itself."""
        close = self.closeness
        equal = self.compared == self.equal and self.tokens_compared == self.tokens_equal
        return equal and not self.problems and close.top1_vs_stock >= close.stock_flash_vs_nonflash


class _Counts(Tally):
    """Counts for the report as well."""

    def __init__(self, totals: HeldTotals) -> None:
        super().__init__()
        self._totals = totals

    def pages_fell_back(self, cause: str) -> None:
        self._totals.fallbacks += 1

    def shadow_checked(self, outcome: str) -> None:
        self._totals.shadow_checks += 1


@dataclass
class House:
    """An engine's sequence, with where its pages go."""

    sequence: HeldSequence
    holding: Holding
    broker: PeerBroker
    workers: list[PeerWorker]


def held_models(quick: bool) -> list[tuple[str, Path]]:
    """(label, file): a dense one and a hybrid."""
    return (
        [("smollm2", embedded_model()), ("tiny", ensure_preset("tiny"))]
        if quick
        else [
            ("smollm2", embedded_model()),
            ("hybrid-60m", ensure_preset("hybrid-60m")),
        ]
    )


def verify_held(report: Report) -> HeldTotals:
    """Compares all models."""
    totals, rows = HeldTotals(), []
    for label, path in held_models(report.quick):
        checks = (_borders, _faults, _going_back, _deepest)
        for check in checks[:1] if report.quick and label == "smollm2" else checks:
            before = totals.compared, totals.equal
            with _load(path, N_CTX_QUICK if report.quick else N_CTX) as engine:
                report.ran(f"{label} {check.__name__[1:]}", engine.describe())
                check(label, path, engine, report, totals)
            counted = totals.compared - before[0], totals.equal - before[1]
            rows.append((label, check.__name__[1:].replace("_", " "), *counted))
            report.row(model=label, check=check.__name__[1:], compared=counted[0], equal=counted[1])
        if not report.quick or label != "smollm2":
            totals.processes.append(verify_processes(label, path, report))
    _stock(report, totals)
    report.table("held pages against pages kept", ("model", "what", "rows of logits", "equal"), rows)
    for each in totals.processes:
        report.table("the whole system, struck", ("what", "tokens", "equal"), each.rows)
    return totals


def _load(path: Path, n_ctx: int) -> Engine:
    decoding = Decoding("paged", PAGE_TOKENS, GROUP_PAGES, many_rows_from=LIMIT)
    return Engine.load(path, n_ctx=n_ctx, n_threads=N_THREADS, decoding=decoding, device="cpu")


@contextmanager
def _house(engine: Engine, totals: HeldTotals, *workers: PeerWorker) -> Iterator[House]:
    settings = HostSettings(page_tokens=PAGE_TOKENS, group_pages=GROUP_PAGES, kv_host_tokens=LIMIT)
    engine.own.span(0, engine.spec.n_layer_full).truncate(0)
    with tempfile.TemporaryDirectory(prefix="outrigger-held-") as folder:
        broker = PeerBroker(Path(folder) / "journal", LIMIT, list(workers))
        ends = [HeldWorker(number, worker) for number, worker in enumerate(workers)]
        form = page_form(engine.spec, settings, "kernels")
        holding = Holding(engine.own, form, LIMIT, broker, ends, _Counts(totals), shadow_every=1)
        sequence = HeldSequence(engine)
        sequence.holding = holding
        try:
            yield House(sequence, holding, broker, list(workers))
        finally:
            sequence.forget()
            holding.close()
            engine.set_sources(None)
            for worker in workers:
                totals.remote_answers += worker.n_answers
                worker.end()


def answer(
    sequence: HeldSequence, tokens: np.ndarray, n_read: int, before: Before = lambda _position: None
) -> np.ndarray:
    """Logits f32 [1 + N_DECODED, n_vocab] after the prompt and after each token that follows; as Compute runs them.

    before: told each position before something runs there.
    """
    prompt, holding = tokens[:n_read], sequence.holding
    sequence.resume(prompt)
    plan = plan_read(sequence.begin(prompt), n_read, worker="off", split_tokens_min=2)
    read = Read(sequence, prompt, plan, None)
    while read.logits is None:
        before(read.tokens_done)
        _wait_for_room(sequence, 512)
        read.advance(0.0)
        if holding:
            holding.step(sequence.n_canonical)
    logits = [read.logits]
    for position in range(n_read, n_read + N_DECODED):
        before(position)
        _wait_for_room(sequence, 1)
        logits.append(sequence.decode(int(tokens[position]), position))
        if holding:
            holding.step(sequence.n_canonical)
    return np.stack(logits)


def _wait_for_room(sequence: HeldSequence, n: int) -> None:
    while sequence.holding and not sequence.holding.has_room(n):
        sequence.holding.wait(0.01, sequence.n_canonical)


def _kept(engine: Engine, tokens: np.ndarray, n_read: int) -> np.ndarray:
    sequence = HeldSequence(engine)
    sequence.forget()
    return answer(sequence, tokens, n_read)


# --- what is compared


def _borders(label: str, path: Path, engine: Engine, report: Report, totals: HeldTotals) -> None:
    """Prompts that end at borders of pages and groups; no, one and two workers."""
    for n_read in BORDERS[1:2] if report.quick else BORDERS:
        tokens = natural_tokens(path, n_read + N_DECODED, skip=n_read)
        kept = _kept(engine, tokens, n_read)
        for n_workers in (2,) if report.quick and label == "smollm2" else (0, 1, 2):
            workers = [PeerWorker(n_groups_max=2) for _ in range(n_workers)]
            with _house(engine, totals, *workers) as house:
                what = f"{label}, {n_read} tokens, {n_workers} workers"
                totals.compare(what, kept, answer(house.sequence, tokens, n_read))
                report.progress(f"{what}: {house.holding.group_released} groups released")


def _faults(label: str, path: Path, engine: Engine, report: Report, totals: HeldTotals) -> None:
    """Every fault of a worker at every moment, which is there again eight tokens later; and of the broker.

    At every second fault another worker holds the newer groups.
    """
    tokens = natural_tokens(path, N_STRUCK + N_DECODED)
    kept = _kept(engine, tokens, N_STRUCK)
    moments = list(MOMENTS.items())
    for number, fault in enumerate(FAULTS):
        for moment, position in [moments[number % len(moments)]] if report.quick else moments:
            workers = [PeerWorker(n_groups_max=2), PeerWorker()] if number % 2 else [PeerWorker()]
            worker = workers[0]
            with _house(engine, totals, *workers) as house:
                struck = answer(house.sequence, tokens, N_STRUCK, _striking(house, worker, fault, position))
                totals.compare(f"{label}, worker {fault} {moment}, of {len(workers)}", kept, struck)
                report.progress(f"{label}, worker {fault} {moment}")
    for position in list(MOMENTS.values())[:: 2 if report.quick else 1]:
        with _house(engine, totals, PeerWorker()) as house:
            struck = answer(house.sequence, tokens, N_STRUCK, _broker_struck(house, position))
            totals.compare(f"{label}, broker restarted at {position}", kept, struck)


def _striking(house: House, worker: PeerWorker, fault: Fault, position: int) -> Before:
    def before(now: int) -> None:
        if now == position:
            worker.fault = fault
        elif now == position + 8:
            house.broker.place_again()

    return before


def _broker_struck(house: House, position: int) -> Before:
    def before(now: int) -> None:
        if now == position:
            house.broker.restart()
        house.broker.up = not position < now < position + 6

    return before


def _going_back(label: str, path: Path, engine: Engine, report: Report, totals: HeldTotals) -> None:
    """The same prompt again, one that parts above the limit, one that parts below, and a new process."""
    tokens = natural_tokens(path, N_STRUCK + N_DECODED)
    for parts_at in (N_STRUCK, LIMIT + 300, LIMIT - 300):
        other = tokens.copy()
        other[parts_at:] = other[parts_at:][::-1]
        kept = _kept(engine, other, N_STRUCK)
        with _house(engine, totals, PeerWorker()) as house:
            answer(house.sequence, tokens, N_STRUCK)
            totals.compare(f"{label}, parts at {parts_at}", kept, answer(house.sequence, other, N_STRUCK))
            house.broker.restart()
            engine.own.span(0, engine.spec.n_layer_full).truncate(0)
            sequence = HeldSequence(engine)  # knows nothing: the journal does
            sequence.holding = house.holding
            again = answer(sequence, other, N_STRUCK)
            totals.compare(f"{label}, parts at {parts_at}, then a new sequence", kept, again)
            report.progress(f"{label}, gone back to {parts_at}")


def _deepest(label: str, path: Path, engine: Engine, report: Report, totals: HeldTotals) -> None:
    """To the end of the context: SmolLM2 to its full 8,192, the hybrid to more than four times the limit."""
    n_read = engine.n_ctx - 2 * N_DECODED
    tokens = natural_tokens(path, n_read + N_DECODED)
    kept = _kept(engine, tokens, n_read)
    with _house(engine, totals, PeerWorker()) as house:
        totals.compare(f"{label}, {n_read} tokens", kept, answer(house.sequence, tokens, n_read))
        report.progress(f"{label}, {n_read} tokens: {house.holding.group_released} groups released")


def _stock(report: Report, totals: HeldTotals) -> None:
    """How often the likeliest token is stock's, past the limit, beside stock with and without flash attention."""
    path, n_read = embedded_model(), LIMIT + 512
    tokens = natural_tokens(path, n_read + (60 if report.quick else 400), skip=5000)
    model = StockModel(path, repack=True)
    flash, plain = (StockContext(model, n_ctx=N_CTX_QUICK, flash_attention=on) for on in (True, False))
    with _load(path, N_CTX_QUICK) as engine:
        totals.closeness = teacher_forced(engine, flash, plain, tokens, n_read)
    for context in (flash, plain, model):
        context.close()
    for d in totals.closeness.differences:
        report.progress(
            f"position {d.position}: {d.ours}, stock {d.stock}, {d.gap:.3f} behind in stock's logits"
        )

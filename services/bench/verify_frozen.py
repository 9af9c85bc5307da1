"""`outrigger verify --frozen`: the same answers with frozen pages as without, on natural text, token by token.

One engine; sequences of it read the same text by flash attention and then decode it by pages, each step with the token
the text has. One has nothing but ordinary kernels. In the others old groups of keys are page programs: run by the
interpreter (what is verified), by fp32 kernels (how far two roundings of the same mathematics are apart), and with int8
keys and values (which the product does not have). Two parts:

    same inputs    each layer gets the residual of the paged path: errors of attention (against float64) and of layers
    free           each goes on from its own rows: KL of the next-token distribution, greedy choices

Programs serve every complete group here: more keys than the product's shares would give them. Never run on Apple
hardware. Called by services.cli.verify.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from msgspec import to_builtins

from common.engine.engine import Decoding, Engine
from common.engine.grid import cut
from common.engine.sequence import EngineSequence
from common.limits import MIB
from common.model.embedded import embedded_model, gemma3_model
from common.model.synthetic import ensure_preset
from device.coreml.accuracy import BOUNDS
from device.coreml.frozen.runtime import InterpreterRuntime
from device.coreml.reference import Arithmetic
from device.frozen_source import FrozenOptions, FrozenSource
from services.bench.frozen_ways import Int8Runtime, Probe, Way
from services.bench.report import Report
from services.bench.texts import natural_tokens

LAYER_BOUND = 2e-2
"""Largest relative error of the residual behind a layer that got the same residual. Matrices of quantised weights round
what attention gives them: exact attention alone moves residuals by up to 0.7e-2."""
KL_BOUND = 2e-2
"""Largest mean KL in nats; fp32 kernels over the same keys reach 0.5e-2."""
FP32 = Arithmetic()
GAP_BOUND = 0.1
"""A top-2 gap, in standard deviations of the logits, that rounding may close: 2 √2 times the 3.5 % of their spread by
which fp32 kernels over the same keys move each logit. Wider gaps must not change."""
ALL_KEYS = ((1, 1.0),)
BUDGET_BYTES = 4096 * MIB


@dataclass(frozen=True)
class Sizes:
    """How many tokens are read, decoded with the same inputs, decoded freely; keys of a frozen page."""

    n_read: int
    n_same: int
    n_free: int
    group_tokens: int

    @property
    def n_all(self) -> int:
        return self.n_read + self.n_same + self.n_free


FULL, QUICK = Sizes(2048, 8, 96, 512), Sizes(640, 2, 16, 256)
PAGES_A_GROUP = 2


def _ways() -> list[Way]:
    return [
        Way("_kernels", "ordinary kernels"),
        Way("", "frozen pages (interpreter)"),
        Way("_fp32", "fp32 kernels"),
        Way("_int8", "int8 pages (fp32 sums)"),
    ]


@dataclass
class FrozenTotals:
    """`ways`: ordinary kernels (their attention only), frozen pages, fp32 kernels, int8 pages.

    `differences` are choices of frozen pages that changed although their gap is wider than rounding can close.
    """

    arithmetic: Arithmetic = field(default_factory=Arithmetic)
    """How page programs add."""
    compared: int = 0
    near_ties: int = 0
    ways: list[Way] = field(default_factory=_ways)
    ties: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)

    @property
    def frozen(self) -> Way:
        return self.ways[1]

    @property
    def attention_bound(self) -> float:
        """Largest error of attention over frozen keys, any row of any layer: what docs/frozen-pages.md states."""
        return max(BOUNDS[self.arithmetic.accumulator])

    def problems(self) -> list[str]:
        """What is not as it must be, a line each."""
        found = [f"different: {text}" for text in self.differences]
        for what, value, bound in (
            ("attention over frozen keys", self.frozen.attention_max, self.attention_bound),
            ("a residual behind a layer", self.frozen.layer_max, LAYER_BOUND),
            ("mean KL", self.frozen.kl_mean, KL_BOUND),
        ):
            if not value <= bound:
                found.append(f"OUT OF BOUNDS {what}: {value:.3g}, allowed {bound:g}")
        return found


def verify_frozen(report: Report, arithmetic: Arithmetic = FP32) -> FrozenTotals:
    """Compare on every model; the caller decides what a difference means. Raises ModelError, EngineError."""
    totals, sizes = FrozenTotals(arithmetic), QUICK if report.quick else FULL
    for label, path in frozen_models(report.quick):
        model = verify_model(label, path, sizes, report, arithmetic)
        _tell(label, model, report)
        totals.compared += model.compared
        totals.near_ties += model.near_ties
        totals.ties += model.ties
        totals.differences += model.differences
        for whole, part in zip(totals.ways, model.ways, strict=True):
            whole.join(part)
    return totals


def arithmetic_of(accumulator: str) -> Arithmetic:
    """An assumption about the hardware: fp32 sums, or another accumulator that flushes subnormals, which is worse."""
    return Arithmetic(accumulator, "kept" if accumulator == "fp32" else "flushed")


def frozen_models(quick: bool) -> list[tuple[str, Path]]:
    """(label, file): a llama, a hybrid with the 27B's attention heads and, in a full run, Gemma 3."""
    found = [("smollm2", embedded_model()), ("hybrid-27b-heads", ensure_preset("hybrid-27b-heads"))]
    return found if quick else [*found, ("gemma3-270m", gemma3_model())]


def verify_model(
    label: str, path: Path, sizes: Sizes, report: Report, arithmetic: Arithmetic = FP32
) -> FrozenTotals:
    """All of it on one model."""
    totals, tokens = FrozenTotals(arithmetic), natural_tokens(path, sizes.n_all, skip=20_000)
    decoding = Decoding("paged", sizes.group_tokens // PAGES_A_GROUP, PAGES_A_GROUP)
    with Engine.load(path, n_ctx=sizes.n_all, decoding=decoding) as engine:
        report.ran("host", {"model": label, **engine.describe()})
        sequences = [engine.sequence(sizes.n_all) for _ in totals.ways]
        for sequence in sequences:
            span = sequence.span(0, engine.spec.n_layer_full)
            for position, n in cut(0, sizes.n_read):
                span.run(tokens[position : position + n], position)
        report.progress(f"{label}: freezing {sizes.n_read:,} keys, {sizes.group_tokens} a page")
        with _frozen(engine, sequences[1:], sizes.n_read, arithmetic) as sources:
            paged, n_free = sequences[0], sizes.n_read + sizes.n_same
            paged.set_sources(Probe(sources, totals.ways).choose)
            for position in range(sizes.n_read, n_free):
                _same_inputs(sequences, tokens, position, totals)
            paged.set_sources(None)
            for position in range(n_free, sizes.n_all):
                _free(label, sequences, tokens, position, totals, report)
            for way, source in zip(totals.ways[1:], sources, strict=True):
                way.keys = source.keys
            report.row(model=label, frozen=to_builtins(sources[0].groups.report()))
    return totals


@contextmanager
def _frozen(
    engine: Engine, sequences: Sequence[EngineSequence], n_keys: int, arithmetic: Arithmetic
) -> Iterator[list[FrozenSource]]:
    """One source for each way but the first, with everything built."""
    with tempfile.TemporaryDirectory(prefix="outrigger-frozen-") as folder:
        scratch, sources = Path(folder), []
        options = (
            FrozenOptions(
                "interpreter", scratch / "fp16", BUDGET_BYTES, ALL_KEYS, InterpreterRuntime(arithmetic)
            ),
            FrozenOptions("kernels", scratch / "fp32", BUDGET_BYTES, ALL_KEYS),
            FrozenOptions("kernels", scratch / "int8", BUDGET_BYTES, ALL_KEYS, Int8Runtime()),
        )
        try:
            for sequence, each in zip(sequences, options, strict=True):
                sources.append(FrozenSource(engine, sequence, each))
                sources[-1].build(n_keys)
            yield sources
        finally:
            for source in sources:
                source.close()


def _same_inputs(
    sequences: Sequence[EngineSequence], tokens: np.ndarray, position: int, totals: FrozenTotals
) -> None:
    """One token, layer by layer: every sequence gets the residual that ordinary kernels made."""
    rows, last = tokens[position : position + 1], sequences[0].spec.n_layer_full - 1
    for layer in range(last + 1):
        results = [
            sequence.span(layer, layer + 1).run(rows, position, "last" if layer == last else "none")
            for sequence in sequences
        ]
        if layer < last:
            for way, found in zip(totals.ways, results, strict=True):
                way.add_layer(layer, found[-1], results[0][-1])
        rows = results[0]


def _free(
    label: str,
    sequences: Sequence[EngineSequence],
    tokens: np.ndarray,
    position: int,
    totals: FrozenTotals,
    report: Report,
) -> None:
    """One token on every sequence, whole, and what came of it."""
    row = tokens[position : position + 1]
    logits = [s.span(0, s.spec.n_layer_full).run(row, position, "last")[-1] for s in sequences]
    same = [way.add_logits(found, logits[0]) for way, found in zip(totals.ways, logits, strict=True)]
    first, second = np.sort(np.partition(logits[0], -2)[-2:])[::-1]
    gap = float((first - second) / logits[0].std())
    totals.compared += 1
    totals.near_ties += gap <= GAP_BOUND
    if not same[1]:
        text = f"{label} position {position}: gap {gap:.4f} of the logits' spread"
        (totals.ties if gap <= GAP_BOUND else totals.differences).append(text)
    report.row(
        model=label, position=position, gap=gap,
        same={way.title: is_same for way, is_same in zip(totals.ways, same, strict=True)},
        kl={way.title: way.kl[-1] for way in totals.ways},
    )  # fmt: skip
    if totals.compared % 16 == 0:
        report.progress(f"{label}: {totals.frozen.top1} of {totals.compared} greedy choices equal")


def _tell(label: str, model: FrozenTotals, report: Report) -> None:
    """One model's figures, a column for each way."""
    report.table(
        f"{label}: frozen pages ({model.arithmetic}) against the paged path, {model.compared} tokens freely decoded",
        ("", *(way.title for way in model.ways)),
        [
            ("attention error, worst row and layer", *(f"{way.attention_max:.1e}" for way in model.ways)),
            ("residual error, worst layer", *(f"{way.layer_max:.1e}" for way in model.ways)),
            ("KL, mean nats", *(f"{way.kl_mean:.1e}" for way in model.ways)),
            ("same greedy choice", *(f"{way.top1} of {model.compared}" for way in model.ways)),
            ("keys served by pages", *(f"{way.keys:,}" for way in model.ways)),
        ],
    )
    for way in model.ways:
        report.row(model=label, way=way.title, attention=way.attention, layers=way.layers)

"""Rounds of a split measurement: what one is, which of them count, and what makes a read worth nothing.

A round is one read of the same prompt by every host, one after the other. Rounds that other programs disturbed are
repeated, and the least disturbed count: chosen by what others did to the machine, never by what was measured. Pure;
used by services.bench.split.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from common.limits import UBATCH_TOKENS
from services.bench.client import Answer
from services.bench.load import BUSY_SHARE
from services.bench.pipeline import pipeline_bound_s
from services.bench.report import NotMeasuredError
from services.bench.rig import Seat

NEW_TOKENS, LONG_TOKENS = 2048, 8192
ALONE = "alone"
"""Name of the seat of a host alone."""


@dataclass(frozen=True)
class Case:
    """One model and what is measured on it."""

    label: str
    path: Path
    forty: int
    """40/64 of the layers."""
    depths: tuple[int, ...]
    n_rounds: int
    n_ctx: int = 8192
    long_reads: bool = False
    """Whether reads of LONG_TOKENS are measured, too."""
    neighbours: bool = False
    """Whether the layers beside the planner's choice are tried, too."""
    worst: bool = True
    """Whether a worker that slows down is measured."""
    layer: int | None = None
    """Take this one for the planner's choice."""


@dataclass
class Round:
    """One read of the same prompt on every seat: answers by the seat's name, ALONE for the host alone."""

    answers: dict[str, Answer] = field(default_factory=dict)
    others_share: float = 0.0
    """The most that other programs took of the machine during one of these reads."""


@dataclass
class Readings:
    """The rounds that count of one (model, depth, number of new tokens), and the split layer of every seat."""

    case: Case
    depth: int
    rounds: list[Round]
    layers: dict[str, int]
    """By seat name; only split seats over plain loopback compete for the best layer."""
    n_new: int = NEW_TOKENS

    def answers(self, seat: str) -> list[Answer]:
        return [measured.answers[seat] for measured in self.rounds]

    def read_s(self, seat: str) -> float:
        """Median seconds from asking to the first token."""
        return median(answer.first_token_s for answer in self.answers(seat))

    def speedup(self, seat: str) -> float:
        return self.read_s(ALONE) / self.read_s(seat)

    def efficiency(self, seat: str) -> float:
        """Median of (bound from the read's own stages / its time)."""
        return median(
            pipeline_bound_s(answer.report.stages) / answer.first_token_s for answer in self.answers(seat)
        )

    def worker_tokens(self, seat: str) -> int:
        return sum(answer.report.tokens_worker for answer in self.answers(seat))

    @property
    def best(self) -> str:
        """Name of the seat that was fastest over plain loopback."""
        return max((seat for seat in self.layers if "-" not in seat), key=self.speedup)

    @property
    def words(self) -> str:
        """How figures call the length of these reads."""
        return "2k" if self.n_new == NEW_TOKENS else "8k"

    @property
    def others_share(self) -> float:
        return max(measured.others_share for measured in self.rounds)


def rounds_missing(rounds: list[Round], n_wanted: int, *, may_repeat: bool) -> bool:
    """Whether to go on: until enough rounds were quiet, at most twice as many as wanted, and only if time allows it."""
    if len(rounds) < n_wanted:
        return True
    n_quiet = sum(measured.others_share <= BUSY_SHARE for measured in rounds)
    return may_repeat and n_quiet < n_wanted and len(rounds) < 2 * n_wanted


def quietest(rounds: list[Round], n_wanted: int) -> list[Round]:
    """The rounds that count: those in which other programs took least of the machine, whatever they measured."""
    return sorted(rounds, key=lambda measured: measured.others_share)[:n_wanted]


def check_read(
    where: str, depth: int, seat: Seat, answer: Answer, alone: Answer | None, n_new: int = NEW_TOKENS
) -> None:
    """Raise NotMeasuredError unless this read of n_new tokens did what it is for, and chose what `alone` did."""
    read = answer.report
    if read.tokens_cache != depth:
        raise NotMeasuredError(f"{where}: {read.tokens_cache} tokens were reused, expected {depth}")
    if read.fallbacks:
        raise NotMeasuredError(f"{where}: the worker failed ({', '.join(read.fallbacks)})")
    expected = n_new - UBATCH_TOKENS if seat.split_layer else 0
    if read.tokens_worker != expected:
        raise NotMeasuredError(
            f"{where}: the worker ran {read.tokens_worker} tokens, expected {expected} ({read.bypass_reason})"
        )
    if alone is not None and answer.token_ids != alone.token_ids:
        raise NotMeasuredError(f"{where}: it chose {answer.token_ids}, the host alone {alone.token_ids}")

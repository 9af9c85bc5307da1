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

NEW_TOKENS = 2048


@dataclass(frozen=True)
class Case:
    """One model and what is measured on it."""

    label: str
    path: Path
    split_layers: tuple[int, ...]
    """The first one is 40/64 of the layers."""
    depths: tuple[int, ...]
    n_rounds: int
    n_ctx: int = 8192


@dataclass
class Round:
    """One read of the same prompt on every seat: answers by split layer, 0 for the host alone."""

    answers: dict[int, Answer] = field(default_factory=dict)
    others_share: float = 0.0
    """The most that other programs took of the machine during one of these reads."""


@dataclass
class Readings:
    """The rounds that count of one (model, depth)."""

    case: Case
    depth: int
    rounds: list[Round]

    def answers(self, split_layer: int) -> list[Answer]:
        return [measured.answers[split_layer] for measured in self.rounds]

    def read_s(self, split_layer: int) -> float:
        """Median seconds from asking to the first token."""
        return median(answer.first_token_s for answer in self.answers(split_layer))

    def speedup(self, split_layer: int) -> float:
        return self.read_s(0) / self.read_s(split_layer)

    def efficiency(self, split_layer: int) -> float:
        """Median of (bound from the read's own stages / its time)."""
        return median(
            pipeline_bound_s(answer.report.stages) / answer.first_token_s
            for answer in self.answers(split_layer)
        )

    def worker_tokens(self, split_layer: int) -> int:
        return sum(answer.report.tokens_worker for answer in self.answers(split_layer))

    @property
    def best_layer(self) -> int:
        return max(self.case.split_layers, key=self.speedup)

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


def check_read(where: str, depth: int, seat: Seat, answer: Answer, alone: Answer | None) -> None:
    """Raise NotMeasuredError unless this read of NEW_TOKENS did what it is measured for, and chose what `alone` did."""
    read = answer.report
    if read.tokens_cache != depth:
        raise NotMeasuredError(f"{where}: {read.tokens_cache} tokens were reused, expected {depth}")
    if read.fallbacks:
        raise NotMeasuredError(f"{where}: the worker failed ({', '.join(read.fallbacks)})")
    expected = NEW_TOKENS - UBATCH_TOKENS if seat.split_layer else 0
    if read.tokens_worker != expected:
        raise NotMeasuredError(
            f"{where}: the worker ran {read.tokens_worker} tokens, expected {expected} ({read.bypass_reason})"
        )
    if alone is not None and answer.token_ids != alone.token_ids:
        raise NotMeasuredError(f"{where}: it chose {answer.token_ids}, the host alone {alone.token_ids}")

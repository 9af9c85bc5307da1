"""Energy of generations: the battery's rate integrated inside their windows, and nowhere else.

Pure. One percent an hour of a battery of 10 Wh is 0.1 W. What a window lacks in samples is told and taken at the mean
of those it has; a run that lacks more than a tenth is refused. Called by services.cli.energy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import SettingError
from services.bench.energy.samples import Sample, Trace

COVERED_MIN = 0.9
BATTERY_WH_MAX = 200.0
FAINT_S = 0.05
"""Less than this without samples is not worth a word: edges of windows seldom fall on samples."""


@dataclass(frozen=True)
class Window:
    """One generation: [first_s, last_s) on the trace's clock, and the tokens it gave."""

    first_s: float
    last_s: float
    n_tokens: int

    @property
    def seconds(self) -> float:
        return self.last_s - self.first_s


@dataclass(frozen=True)
class RunEnergy:
    """One run's figures, over all its windows. `outside_w` is the mean power in none of them; NaN without samples."""

    name: str
    n_windows: int
    seconds: float
    n_tokens: int
    mean_w: float
    joules: float
    outside_w: float
    missing_s: float
    notes: tuple[str, ...]

    @property
    def joules_per_token(self) -> float:
        return self.joules / self.n_tokens

    @property
    def tokens_per_s(self) -> float:
        return self.n_tokens / self.seconds


def watts(percent_per_hour: float, battery_wh: float) -> float:
    """Mean power of a battery that loses so many percent an hour."""
    return percent_per_hour / 100 * battery_wh


def integrate(trace: Trace, windows: Sequence[Window], battery_wh: float) -> RunEnergy:
    """Figures of one run. Raises SettingError for windows that cannot be, overlap, or lie where no samples are."""
    if not 0 < battery_wh <= BATTERY_WH_MAX:
        raise SettingError(
            f"a battery of {battery_wh:g} Wh: give watt-hours (13.9, say), not milliampere-hours"
        )
    windows = checked(trace.name, windows)
    joules, notes, missing_s = 0.0, list(trace.notes), 0.0
    for window in windows:
        energy_j, covered_s = energy_in(trace.samples, window, battery_wh)
        gap_s = window.seconds - covered_s
        if covered_s < COVERED_MIN * window.seconds:
            raise SettingError(
                f"{trace.name}: samples cover {covered_s:.1f} of the {window.seconds:.1f} s from {window.first_s:g} s "
                f"on, less than {COVERED_MIN:.0%}; record again, or correct the window (the trace goes from "
                f"{trace.samples[0].at_s:g} to {_end_s(trace.samples[-1]):g} s)"
            )
        if gap_s > FAINT_S:
            notes.append(
                f"{gap_s:.1f} s without samples in the window from {window.first_s:g} s on: taken at its mean"
            )
            missing_s += gap_s
        joules += energy_j * window.seconds / covered_s
    seconds = sum(window.seconds for window in windows)
    return RunEnergy(
        trace.name, len(windows), seconds, sum(window.n_tokens for window in windows), joules / seconds, joules,
        _outside_w(trace.samples, windows, battery_wh), missing_s, tuple(notes),
    )  # fmt: skip


def checked(name: str, windows: Sequence[Window]) -> list[Window]:
    """Windows by time. Raises SettingError where one is empty, without tokens, or overlaps another."""
    if not windows:
        raise SettingError(f"{name}: no window: say when it generated, and how many tokens")
    for window in windows:
        if not (math.isfinite(window.first_s) and math.isfinite(window.last_s) and window.seconds > 0):
            raise SettingError(f"{name}: the window from {window.first_s:g} to {window.last_s:g} s is empty")
        if window.n_tokens < 1:
            raise SettingError(
                f"{name}: the window from {window.first_s:g} s on has {window.n_tokens} tokens"
            )
    ordered = sorted(windows, key=lambda window: window.first_s)
    for before, after in itertools.pairwise(ordered):
        if after.first_s < before.last_s:
            raise SettingError(
                f"{name}: windows overlap: {before.first_s:g} to {before.last_s:g} s and {after.first_s:g} to "
                f"{after.last_s:g} s; their energy would be counted twice"
            )
    return ordered


def energy_in(samples: Sequence[Sample], window: Window, battery_wh: float) -> tuple[float, float]:
    """(joules, seconds that samples cover) inside a window."""
    joules = covered_s = 0.0
    for sample in samples:
        shared_s = min(_end_s(sample), window.last_s) - max(sample.at_s, window.first_s)
        if shared_s > 0:
            joules += watts(sample.percent_per_hour, battery_wh) * shared_s
            covered_s += shared_s
    return joules, covered_s


def _outside_w(samples: Sequence[Sample], windows: Sequence[Window], battery_wh: float) -> float:
    whole = Window(samples[0].at_s, _end_s(samples[-1]), 1)
    joules, seconds = energy_in(samples, whole, battery_wh)
    for window in windows:
        inside_j, inside_s = energy_in(samples, window, battery_wh)
        joules, seconds = joules - inside_j, seconds - inside_s
    return joules / seconds if seconds > FAINT_S else math.nan


def _end_s(sample: Sample) -> float:
    return sample.at_s + sample.seconds

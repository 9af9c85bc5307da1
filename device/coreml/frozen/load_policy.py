"""Whether to load a page now, later, again or never: pure decisions from attempts and facts.

What others met on real devices, and what follows from it:

    the compiler writes about a gigabyte while it works      -> disk is checked before, not after
    a failed compilation is remembered for minutes           -> one retry, after a pause longer than that memory
    the retry's error misleads ("functionName must be nil")  -> the first error is the one reported
    a load may hang for ever                                 -> a deadline; nothing more is loaded until it returns
    it may load and run elsewhere, slowly or wrongly         -> placement, speed and a golden answer are checked
    repeated compiling heats the device                      -> nothing is loaded while it is hot

Knows no runtime and no clock; times are passed in. Called by FrozenPages; `loader` performs one attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

MIB = 1 << 20


class Cause(StrEnum):
    """Why a page is not in use; one word each, for metrics."""

    DISK = "disk"
    MEMORY = "memory"
    THERMAL = "thermal"
    COMPILE = "compile"
    HANG = "hang"
    PLACEMENT = "placement"
    SLOW = "slow"
    WRONG = "wrong"
    ROWS = "rows"
    """The keys cannot be held in a page program (not finite, or V too large)."""
    OTHER = "other"


RETRIED = frozenset({Cause.COMPILE, Cause.OTHER})
"""Failures that a later attempt has been seen to get over."""


@dataclass(frozen=True)
class LoadLimits:
    """Settings of the policy."""

    disk_reserve_bytes: int = 2048 * MIB
    """Free disk to leave over, beside the page: the compiler needs about 1.1 GB, failed tries as much again."""
    memory_margin_bytes: int = 800 * MIB
    """Memory to leave over, beside the page: the app is killed, not told, when it passes its limit."""
    thermal_max: int = 1
    """0 nominal, 1 fair, 2 serious, 3 critical."""
    deadline_s: float = 60.0
    pause_s: float = 240.0
    """Between a failure and its retry; the failure is remembered by the device for minutes."""
    attempts_max: int = 2
    ask_s_max: float = 0.25
    """Slowest golden answer: a page slower than ordinary kernels is of no use."""
    golden_error_max: float = 0.1
    """Largest relative error of the golden answer; an engine that adds in fp16 one by one reaches 0.08."""


@dataclass(frozen=True)
class DeviceFacts:
    """What the device says of itself at one moment."""

    disk_free_bytes: int
    memory_free_bytes: int
    thermal: int = 0


@dataclass(frozen=True)
class Attempt:
    """One try to load a page: how it ended (None: well), in whose words, when and how long it took."""

    cause: Cause | None
    text: str
    ended_s: float
    seconds: float


@dataclass(frozen=True)
class Load:
    """Load it now."""


@dataclass(frozen=True)
class WaitUntil:
    """Look again at `at_s`; until then other pages may be built."""

    at_s: float
    cause: Cause


@dataclass(frozen=True)
class Postpone:
    """Not while the device is like this; nothing else is loaded either."""

    cause: Cause
    text: str


@dataclass(frozen=True)
class GiveUp:
    """This page will not be loaded; `cause` and `text` are those of its first failure."""

    cause: Cause
    text: str


def decide(
    attempts: Sequence[Attempt], facts: DeviceFacts, page_bytes: int, limits: LoadLimits, now_s: float
) -> Load | WaitUntil | Postpone | GiveUp:
    """What to do with a page that is not loaded yet."""
    if attempts:
        first, last = attempts[0], attempts[-1]
        if len(attempts) >= limits.attempts_max or last.cause not in RETRIED:
            assert first.cause is not None, "a page that loaded is not asked about again"
            return GiveUp(first.cause, first.text)
    short = postponed(facts, page_bytes, limits)
    if short is not None:
        return short
    if attempts and now_s < attempts[-1].ended_s + limits.pause_s:
        return WaitUntil(attempts[-1].ended_s + limits.pause_s, attempts[0].cause or Cause.OTHER)
    return Load()


def postponed(facts: DeviceFacts, page_bytes: int, limits: LoadLimits) -> Postpone | None:
    """Why nothing should be loaded on the device as it is, if so."""
    disk_bytes = page_bytes + limits.disk_reserve_bytes
    if facts.disk_free_bytes < disk_bytes:
        return Postpone(
            Cause.DISK, f"{_mib(facts.disk_free_bytes)} of disk free, a load wants {_mib(disk_bytes)}"
        )
    memory_bytes = page_bytes + limits.memory_margin_bytes
    if facts.memory_free_bytes < memory_bytes:
        free = _mib(facts.memory_free_bytes)
        return Postpone(Cause.MEMORY, f"{free} of memory free, a load wants {_mib(memory_bytes)}")
    if facts.thermal > limits.thermal_max:
        return Postpone(
            Cause.THERMAL, f"thermal state {facts.thermal}, loads stop above {limits.thermal_max}"
        )
    return None


def judge(
    placement: str, wanted: str, ask_s: float, error: float, limits: LoadLimits
) -> tuple[Cause, str] | None:
    """What is wrong with a page that loaded, if anything: where it runs, how exact it is, how fast."""
    if wanted not in (placement, "any"):
        return Cause.PLACEMENT, f"placed on {placement}, wanted on {wanted}"
    if not error <= limits.golden_error_max:  # NaN is wrong too
        return Cause.WRONG, f"golden answer off by {error:.2g}, allowed {limits.golden_error_max:.2g}"
    if ask_s > limits.ask_s_max:
        return Cause.SLOW, f"golden answer took {ask_s * 1e3:.1f} ms, allowed {limits.ask_s_max * 1e3:.1f}"
    return None


def _mib(n_bytes: int) -> str:
    return f"{n_bytes / MIB:,.0f} MiB"

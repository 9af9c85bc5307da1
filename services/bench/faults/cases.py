"""Every fault at every kind of moment, as scripts of the emulator, and what must be seen when it happened.

A moment is where in an answer the fault strikes; a kind is what goes wrong there. Not every pair exists: a bit can be
flipped only in a frame, and a greeting goes wrong only after the connection was lost, so these cut it first. Pure;
used by services.bench.verify_faults.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Noticed = Literal["lost", "maybe"]
"""lost: the read that is struck must lose the worker. maybe: it may or may not; the tokens are equal in any case."""


@dataclass(frozen=True)
class FaultKind:
    """One way to go wrong. `line` is the script: {when} is the moment, {long} a time that outlasts the bridge."""

    name: str
    line: str
    noticed: Noticed
    refuses: bool = False
    """The next greeting is refused, so the worker comes back only when the bridge asks again."""


@dataclass(frozen=True)
class Moment:
    """When it goes wrong. {middle}, {last} and {token} (split decode: a token of the answer) are numbers of chunks."""

    name: str
    when: str
    when_flip: str | None
    """Where a bit is flipped instead; None: nothing moves then that could be changed."""
    in_read: bool = True
    """A read is under way for certain that depends on the worker (a SYNC may also come between two)."""


@dataclass(frozen=True)
class Case:
    """One fault at one moment."""

    kind: FaultKind
    moment: Moment

    @property
    def name(self) -> str:
        return f"{self.kind.name}, {self.moment.name}"

    @property
    def must_lose_worker(self) -> bool:
        """Whether the answer's report must tell that the worker was lost or its work taken back."""
        return self.kind.noticed == "lost" and self.moment.in_read

    def script(self, n_chunks: int, freeze_long_s: float) -> str:
        """The emulator's script for an answer whose read sends n_chunks chunks.

        freeze_long_s must be longer than the bridge waits for an answer.
        """
        when = self.moment.when_flip if self.kind.name == "flip" else self.moment.when
        assert when is not None, f"{self.name} does not exist"
        when = when.format(middle=max(1, n_chunks // 2), last=n_chunks, token=n_chunks + TOKENS_BEFORE)
        return self.kind.line.format(when=when, long=f"{freeze_long_s:g}")


KINDS = (
    FaultKind("cut", "cut {when}", "lost"),
    FaultKind("short freeze", "freeze 0.4 {when}", "maybe"),
    FaultKind("long freeze", "freeze {long} {when}", "lost"),
    FaultKind("flip", "flip {when}", "lost"),
    FaultKind("slow-down", "slow 6 for 2 {when}", "maybe"),
    FaultKind("memory low", "memory-low for 2 {when}", "maybe"),
    FaultKind("out of memory", "out-of-memory {when}", "maybe"),
    FaultKind("suspending notice", "suspend 1 {when}", "maybe"),
    FaultKind("restart, new boot id", "restart 0.3 {when}", "lost"),
    FaultKind("wrong version", "wrong-version {when}; cut {when}", "lost", refuses=True),
    FaultKind("foreign model", "foreign-model {when}; cut {when}", "lost", refuses=True),
)


MOMENTS = (
    Moment("before", "now", None, in_read=False),
    Moment("mid-chunk", "in chunk {middle}", "in chunk {middle}"),
    Moment("between chunks", "after chunk {middle}", "answering chunk {middle}"),
    Moment("last chunk", "during chunk {last}", "answering chunk {last}"),
    Moment("during SYNC", "in sync 1", "in sync 1", in_read=False),
    Moment("mid-decode", "now", None, in_read=False),
)
BEFORE, MID_CHUNK, BETWEEN_CHUNKS, _LAST_CHUNK, DURING_SYNC, MID_DECODE = MOMENTS
TOKENS_BEFORE = 5
"""Tokens of an answer that are there when a fault strikes split decode, where each token is a chunk of its own."""
SPLIT_DECODE_MOMENTS = (
    Moment("split decode, in the prompt", "in chunk {middle}", "answering chunk {middle}"),
    Moment("split decode, in a token", "in chunk {token}", "answering chunk {token}"),
    Moment("split decode, between tokens", "after chunk {token}", "in chunk {token}"),
)


def cases(
    kinds: Sequence[FaultKind], moments: Sequence[Moment], *, refusals_at: Sequence[Moment] = MOMENTS
) -> list[Case]:
    """Every pair that exists. refusals_at: moments of the kinds that end in a refused greeting, which take long."""
    return [
        Case(kind, moment)
        for moment in moments
        for kind in kinds
        if (kind.name != "flip" or moment.when_flip) and (not kind.refuses or moment in refusals_at)
    ]

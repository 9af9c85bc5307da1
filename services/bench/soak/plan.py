"""What a soak does: an endless list of requests for each client, and of faults, from a seed. Pure.

The same seed gives the same lists; how far a run gets in them depends on the machine. Used by services.bench.soak.run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["chat", "read", "cancel", "reconnect"]
KINDS: dict[Kind, float] = {"chat": 0.5, "read": 0.2, "cancel": 0.15, "reconnect": 0.15}
"""Shares of what clients do: a short prompt; a long one; a long one that is left in the middle; a new connection."""

FAULTS = (
    "cut now",
    "cut during chunk 1",
    "flip in chunk 1",
    "flip answering chunk 1",
    "freeze 0.5 now",
    "freeze 4 during chunk 1",
    "slow 4 for 3 now",
    "out-of-memory during chunk 1",
    "memory-low for 2 now",
    "suspend 1 now",
    "restart 0.3 now",
)
FAULT_EVERY_S = (4.0, 12.0)
PAUSE_S = (0.0, 0.4)


@dataclass(frozen=True)
class Deed:
    """One thing a client does. `leaves_after` is the number of updates after which a cancel leaves."""

    kind: Kind
    prompt: int
    pause_s: float
    leaves_after: int


@dataclass(frozen=True)
class Stroke:
    """A fault, and how long after the one before it."""

    after_s: float
    script: str


def deeds(seed: int, client: int, n_short: int, n_long: int) -> Iterator[Deed]:
    """For ever what one client does; `prompt` counts short prompts first, then long ones."""
    chance = random.Random(f"{seed} client {client}")
    while True:
        (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
        is_long = kind in ("read", "cancel")
        prompt = n_short + chance.randrange(n_long) if is_long else chance.randrange(n_short)
        yield Deed(kind, prompt, chance.uniform(*PAUSE_S), chance.randint(1, 6))


def strokes(seed: int) -> Iterator[Stroke]:
    """For ever the faults, one after the other."""
    chance = random.Random(f"{seed} faults")
    while True:
        yield Stroke(chance.uniform(*FAULT_EVERY_S), chance.choice(FAULTS))

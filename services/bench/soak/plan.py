"""What a soak does: an endless list of requests for each client, and of faults, from a seed. Pure.

The same seed gives the same lists; how far a run gets in them depends on the machine. Used by services.bench.soak.run.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

Kind = Literal["chat", "read", "past", "cancel", "reconnect"]
KINDS: dict[Kind, float] = {"chat": 0.4, "read": 0.15, "past": 0.2, "cancel": 0.15, "reconnect": 0.1}
"""Shares of what clients do: a short prompt; a long one; one past the host's limit; a long one of either kind that is
left in the middle; a new connection."""

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
    "cut in query 2",
    "flip in query 1",
    "flip answering query 2",
    "freeze 2 during query 1",
    "out-of-memory during append 1",
    "cut in append 2",
)
KILLS = ("worker", "bridge", "broker", "mac", "gateway")
ENDS = ("mac", "gateway")
"""Of these: a request under way ends with an error, and its client asks again."""
KILLED_SHARE = 0.25
"""Of all strokes."""
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
    """A fault of the worker or a process that is killed, and how long after the one before it."""

    after_s: float
    script: str = ""
    kill: str = ""


def deeds(seed: int, client: int, n_short: int, n_long: int, n_past: int) -> Iterator[Deed]:
    """For ever what one client does; `prompt` counts short prompts first, then long ones, then those past the limit."""
    chance = random.Random(f"{seed} client {client}")
    while True:
        (kind,) = chance.choices(list(KINDS), list(KINDS.values()))
        first, n = {
            "read": (n_short, n_long),
            "past": (n_short + n_long, n_past),
            "cancel": (n_short, n_long + n_past),
        }.get(kind, (0, n_short))
        prompt = first + chance.randrange(n)
        yield Deed(kind, prompt, chance.uniform(*PAUSE_S), chance.randint(1, 6))


def strokes(seed: int) -> Iterator[Stroke]:
    """For ever the faults, one after the other."""
    chance = random.Random(f"{seed} faults")
    while True:
        after_s = chance.uniform(*FAULT_EVERY_S)
        if chance.random() < KILLED_SHARE:
            yield Stroke(after_s, kill=chance.choice(KILLS))
        else:
            yield Stroke(after_s, chance.choice(FAULTS))

"""Compared: how many tokens of answers that must be equal are, counted one by one. The one place that counts them.

Pure. What a bench compares beyond tokens it adds in a class of its own. Used by everything under services/bench that
compares answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field


def n_alike(right: Sequence[object], found: Sequence[object]) -> tuple[int, int]:
    """(places at which both have the same, places at all): what one of them lacks counts as different."""
    return sum(a == b for a, b in zip(right, found, strict=False)), max(len(right), len(found))


@dataclass
class Compared:
    """Counts over many answers. `problems` are sentences; empty when all is as it must be."""

    compared: int = 0
    equal: int = 0
    problems: list[str] = field(default_factory=list)

    def compare(self, what: str, right: Sequence[object], found: Sequence[object]) -> int:
        """Counts an answer's tokens (or tokens with something of each); every other one is a problem.

        Returns how many are the same.
        """
        n_equal, n_total = n_alike(right, found)
        self.compared += n_total
        self.equal += n_equal
        if n_equal != n_total:
            self.problems.append(f"{what}: {n_equal} of {n_total} tokens equal")
        return n_equal

"""The table of operations: MIL operation name -> function(arithmetic, **inputs) -> array, or list of arrays.

A function gets NumPy arrays in the types the program declares (constants included) and returns values of any type wide
enough; the runner rounds each to the declared type and checks its shape. Filled by the modules beside this one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

OPERATIONS: dict[str, Callable[..., Any]] = {}


def operation(*names: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a function under one or more MIL names."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in names:
            assert name not in OPERATIONS, f"operation {name} is defined twice"
            OPERATIONS[name] = function
        return function

    return register


def ints(values: Any) -> tuple[int, ...]:
    """Axes, shapes, permutations: any integer array or number as a tuple."""
    return tuple(int(v) for v in np.atleast_1d(values))


def axes_of(values: Any, rank: int) -> tuple[int, ...]:
    """Axes as a sorted tuple of non-negative numbers; all axes where none are given."""
    return tuple(range(rank)) if values is None else tuple(sorted(axis % rank for axis in ints(values)))

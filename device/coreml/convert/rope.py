"""Rotary tables: one pair (cosine, sine) a layer kind, computed in float64 and rounded once to fp16.

Scaling is honoured or refused by name, never ignored: a converter that ignored the linear factor 8 of long-context
models was off by 2.0 in the cosines, and nothing said so. Called by both readers and by the programs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from common.errors import ModelError

SUPPORTED = ("default", "linear")
KEYS_IGNORED = frozenset({"type", "rope_type", "factor", "rope_theta"})


@dataclass(frozen=True)
class Rope:
    """How a kind of layer turns its heads: pair i of a head by position / factor * base^(-2i / head_dim)."""

    base: float
    factor: float = 1.0

    def angles(self, positions: np.ndarray, head_dim: int) -> np.ndarray:
        """f64 [n_positions, head_dim / 2]."""
        pairs = np.arange(head_dim // 2, dtype=np.float64)
        return np.outer(positions.astype(np.float64) / self.factor, self.base ** (-2.0 * pairs / head_dim))

    def table(self, n_positions: int, head_dim: int) -> RopeTable:
        """What a program looks up."""
        angles = self.angles(np.arange(n_positions), head_dim)
        return RopeTable(np.cos(angles).astype(np.float16), np.sin(angles).astype(np.float16))


class RopeTable(NamedTuple):
    """One row a position, one column a pair."""

    cos: np.ndarray  # f16 [n_positions, head_dim / 2]
    sin: np.ndarray  # f16 [n_positions, head_dim / 2]


def scaled(base: float, scaling: Mapping[str, Any] | None, where: str) -> Rope:
    """A Rope from a base and a Hugging Face `rope_scaling` (or None).

    Raises ModelError naming the type where it is none that is implemented, or where a key would go unused.
    """
    if not scaling:
        return Rope(_positive(base, f"{where}: rope_theta"))
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in SUPPORTED:
        raise ModelError(
            f"{where}: rope_scaling of type {kind!r} is not implemented (these are: {', '.join(SUPPORTED)}); a model "
            "converted without it would be wrong at every position"
        )
    unknown = sorted(set(scaling) - KEYS_IGNORED)
    if unknown:
        raise ModelError(f"{where}: rope_scaling has {unknown[0]!r}, which type {kind!r} does not know")
    factor = scaling.get("factor", 1.0) if kind == "linear" else 1.0
    if kind == "linear" and "factor" not in scaling:
        raise ModelError(f"{where}: rope_scaling of type 'linear' has no factor")
    return Rope(
        _positive(scaling.get("rope_theta", base), f"{where}: rope_theta"),
        _positive(factor, f"{where}: rope_scaling factor"),
    )


def _positive(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e12:
        raise ModelError(f"{where} is {value!r}; it must be a positive number")
    return float(value)

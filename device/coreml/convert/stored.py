"""How weights lie in a package: fp16 or palettes, made once and used as constants by every function of a program.

A WeightStore belongs to one program. The first function that asks for a weight reads and palettises it; the next ones
get the same arrays under the same `weight_id`, which is how coremltools shares a blob between functions.
Called by programs.py and layers.py.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.errors import ModelError
from device.coreml import toolchain
from device.coreml.convert.description import GemmaModel
from device.coreml.convert.palette import Lut, Palette, palettise

FP16_MAX = 65504.0
BLOCK_WEIGHTS = 1 << 22


@dataclass
class WeightStore:
    """Constants of one program. `on_weights` is told how many weights were just made ready."""

    model: GemmaModel
    lut: Lut | None
    on_weights: Callable[[int], None] = lambda n: None
    errors: list[tuple[int, float]] = field(default_factory=list)
    """(weights, relative error) of every palette made."""
    _held: dict[str, np.ndarray | Palette] = field(default_factory=dict)

    def matrix(self, name: str, first: int = 0, last: int | None = None, trailing: int = 0) -> Any:
        """A MIL value of fp16 [n_out, n_in, 1 * trailing]: a convolution's weight (trailing 2) or a table (0)."""
        key = f"{name}_{first}" if first else name
        if key not in self._held:
            self._held[key] = self._made(name, first, last)
        held, mb = self._held[key], toolchain.builder()
        ones = (1,) * trailing
        if isinstance(held, np.ndarray):
            return _shared(mb, held.reshape(*held.shape, *ones), key)
        types, (n_groups, n_entries) = toolchain.mil_types(), held.tables.shape
        kind = getattr(types, f"uint{int(math.log2(n_entries))}")
        packed = held.indices.astype(types.nptype_from_builtin(kind))
        return mb.constexpr_lut_to_dense(
            indices=_shared(mb, packed.reshape(*held.indices.shape, *ones), f"{key}_indices"),
            lut=_shared(mb, held.tables.reshape(n_groups, 1, *ones, n_entries, 1), f"{key}_table"),
            name=f"{key}_weight",
        )

    def vector(self, name: str, values: np.ndarray) -> Any:
        """A MIL constant of fp16, rounded once from the values given."""
        return _shared(toolchain.builder(), fp16(values, name), name)

    def _made(self, name: str, first: int, last: int | None) -> np.ndarray | Palette:
        weights = self._rounded(name, first, last)
        made: np.ndarray | Palette = weights
        if self.lut is not None:
            made = palettise(weights, self.lut, name)
            self.errors.append((weights.size, made.error(weights)))
        self.on_weights(weights.size)
        return made

    def _rounded(self, name: str, first: int, last: int | None) -> np.ndarray:
        """fp16 rows of a matrix, which may be too large to be held in f32 at once."""
        n_out, n_in = self.model.shape(name)
        last = n_out if last is None else last
        step = max(BLOCK_WEIGHTS // n_in, 1)
        weights = np.empty((last - first, n_in), np.float16)
        for at in range(first, last, step):
            end = min(at + step, last)
            weights[at - first : end - first] = fp16(self.model.rows(name, at, end), name)
        return weights

    @property
    def error(self) -> float:
        """Relative error of all palettes together; 0 without any."""
        total = sum(n for n, _ in self.errors)
        return math.sqrt(sum(n * each**2 for n, each in self.errors) / total) if total else 0.0


def fp16(values: np.ndarray, what: str) -> np.ndarray:
    """Rounded to fp16. Raises ModelError where a weight does not fit, instead of storing an infinity."""
    peak = float(np.abs(values).max()) if values.size else 0.0
    if not peak <= FP16_MAX:
        raise ModelError(f"{what} has a weight of magnitude {peak:g}, beyond fp16's {FP16_MAX:g}")
    return values.astype(np.float16)


def _shared(mb: Any, values: np.ndarray, key: str) -> Any:
    constant = mb.const(val=values, name=key)
    constant.op.weight_id = key
    return constant

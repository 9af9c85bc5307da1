"""Palettes: a weight matrix as small indices into tables of 2^bits fp16 values, one table a group of output channels.

Each weight is palettised once, whatever uses it. What cannot be done as asked is an error: a group that does not divide
the channels, weights that are not finite. Nothing is ever stored as fp16 under the name of a palette.
Called by stored.py and the bench.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.errors import ModelError, SettingError
from device.coreml.convert.kmeans import centres, key_values, order_keys

BITS = (1, 2, 3, 4, 6, 8)
WEIGHTS_AT_ONCE, ROWS_COMPARED = 1 << 20, 256


@dataclass(frozen=True)
class Lut:
    """How to palettise: bits an index, and output channels a table (0: one table for the whole matrix)."""

    bits: int
    group: int = 0

    @classmethod
    def parse(cls, text: str, option: str) -> Lut | None:
        """`none`, `BITS` or `BITS,GROUP` of a command line. Raises SettingError naming the option."""
        if text == "none":
            return None
        bits, _, group = text.partition(",")
        if not bits.isdecimal() or int(bits) not in BITS or not (group or "0").isdecimal():
            raise SettingError(
                f"{option} {text!r}: use none, BITS or BITS,GROUP with BITS one of {', '.join(map(str, BITS))} "
                "and GROUP the output channels that share a table (0: all)"
            )
        return cls(int(bits), int(group or 0))

    def check(self, n_out: int, what: str) -> None:
        """Raises SettingError where the groups do not divide the channels of `what`."""
        if self.group and n_out % self.group:
            fitting = [group for group in (4, 8, 16, 32, 64) if n_out % group == 0]
            raise SettingError(
                f"{what} has {n_out} output channels, which groups of {self.group} do not divide; "
                f"fitting groups: {', '.join(map(str, fitting)) or 'none but 0'}"
            )

    def __str__(self) -> str:
        return f"{self.bits} bits, " + (f"{self.group} channels a table" if self.group else "one table")


@dataclass(frozen=True)
class Palette:
    """indices u8 [n_out, n_in]; tables f16 [n_groups, 2^bits]; rows of a group follow one another."""

    indices: np.ndarray
    tables: np.ndarray

    def dense(self) -> np.ndarray:
        """f16 [n_out, n_in]: what a device computes with."""
        rows = len(self.indices) // len(self.tables)
        group = np.repeat(np.arange(len(self.tables)), rows)[:, None]
        return self.tables[group, self.indices]

    def error(self, weights: np.ndarray) -> float:
        """Relative error: root of the summed squares of the differences, over that of the weights."""
        wrong = total = 0.0
        rows = len(self.indices) // len(self.tables)
        for group, table in enumerate(self.tables.astype(np.float32)):
            for first in range(group * rows, (group + 1) * rows, ROWS_COMPARED):
                part = slice(first, min(first + ROWS_COMPARED, (group + 1) * rows))
                original = weights[part].astype(np.float32)
                wrong += float(np.square(original - table[self.indices[part]]).sum(dtype=np.float64))
                total += float(np.square(original).sum(dtype=np.float64))
        return float(np.sqrt(wrong / max(total, 1e-60)))


def palettise(weights: np.ndarray, lut: Lut, what: str = "a matrix") -> Palette:
    """weights f16 [n_out, n_in]. Raises SettingError (groups), ModelError (not finite)."""
    n_out, n_in = weights.shape
    lut.check(n_out, what)
    if not np.isfinite(weights).all():
        raise ModelError(f"{what} has weights that are not finite in fp16; it cannot be palettised")
    rows = lut.group or n_out
    keys = order_keys(weights).reshape(n_out // rows, rows * n_in)
    indices = np.empty(keys.shape, np.uint8)
    tables = np.empty((len(keys), 1 << lut.bits), np.float16)
    step = max(WEIGHTS_AT_ONCE // keys.shape[1], 1)
    for first in range(0, len(keys), step):
        part = slice(first, first + step)
        tables[part] = np.sort(centres(keys[part], 1 << lut.bits).astype(np.float16), axis=1)
        for group in range(first, min(first + step, len(keys))):
            indices[group] = _nearest(tables[group])[keys[group]]
    return Palette(indices.reshape(n_out, n_in), tables)


def _nearest(table: np.ndarray) -> np.ndarray:
    """u8 [65536]: for every fp16 value, by its order key, the nearest entry of a sorted table."""
    wide = table.astype(np.float64)
    limits = np.searchsorted(_FINITE, (wide[1:] + wide[:-1]) / 2)
    return np.repeat(np.arange(len(table), dtype=np.uint8), np.diff(limits, prepend=0, append=1 << 16))


def _finite_values() -> np.ndarray:
    """key_values with NaN and infinities replaced by the nearest ends, so that they rise throughout."""
    values = key_values().copy()
    positive = np.flatnonzero(values == np.max(values))[0]
    negative = np.flatnonzero(values == np.min(values))[0]
    values[:negative], values[positive:] = values[negative], values[positive]
    return values


_FINITE = _finite_values()

"""Operations that move elements and change none: reshape, transpose, concat, split, pad, tile and their kin."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.errors import PackageError
from device.coreml.reference.arithmetic import Arithmetic
from device.coreml.reference.ops.registry import ints, operation


@operation("reshape")
def reshape(arith: Arithmetic, x: np.ndarray, shape: Any) -> np.ndarray:
    """0 keeps a dimension, -1 is worked out, as in MIL."""
    sizes = ints(shape)
    return x.reshape([x.shape[i] if n == 0 else n for i, n in enumerate(sizes)])


@operation("transpose")
def transpose(arith: Arithmetic, x: np.ndarray, perm: Any) -> np.ndarray:
    return np.transpose(x, ints(perm))


@operation("expand_dims")
def expand_dims(arith: Arithmetic, x: np.ndarray, axes: Any) -> np.ndarray:
    return np.expand_dims(x, ints(axes))


@operation("squeeze")
def squeeze(arith: Arithmetic, x: np.ndarray, axes: Any = None) -> np.ndarray:
    return np.squeeze(x, None if axes is None else ints(axes))


@operation("concat")
def concat(arith: Arithmetic, values: list[np.ndarray], axis: Any = 0, interleave: Any = False) -> np.ndarray:
    if interleave:
        stacked = np.stack(values, axis=int(axis) + 1)
        shape = list(values[0].shape)
        shape[int(axis)] *= len(values)
        return stacked.reshape(shape)
    return np.concatenate([np.atleast_1d(value) for value in values], axis=int(axis))


@operation("stack")
def stack(arith: Arithmetic, values: list[np.ndarray], axis: Any = 0) -> np.ndarray:
    return np.stack(values, axis=int(axis))


@operation("split")
def split(
    arith: Arithmetic, x: np.ndarray, axis: Any, num_splits: Any = None, split_sizes: Any = None
) -> list[np.ndarray]:
    if split_sizes is not None:
        return np.split(x, np.cumsum(ints(split_sizes))[:-1], axis=int(axis))
    return np.split(x, int(num_splits), axis=int(axis))


@operation("tile")
def tile(arith: Arithmetic, x: np.ndarray, reps: Any) -> np.ndarray:
    return np.tile(x, ints(reps))


@operation("reverse")
def reverse(arith: Arithmetic, x: np.ndarray, axes: Any = None) -> np.ndarray:
    return np.flip(x, None if axes is None else ints(axes))


@operation("pad")
def pad(
    arith: Arithmetic, x: np.ndarray, pad: Any, mode: str = "constant", constant_val: Any = 0
) -> np.ndarray:
    """`pad` holds low and high amounts of the last len(pad) / 2 axes."""
    amounts = np.asarray(pad).reshape(-1, 2).tolist()
    widths = [(0, 0)] * (x.ndim - len(amounts)) + [tuple(a) for a in amounts]
    if mode == "constant":
        return np.pad(x, widths, constant_values=constant_val)
    known = {"reflect": "reflect", "replicate": "edge"}
    if mode not in known:
        raise PackageError(f"pad mode {mode!r}; known: constant, reflect, replicate")
    return np.pad(x, widths, mode=known[mode])


@operation("shape")
def shape_of(arith: Arithmetic, x: np.ndarray) -> np.ndarray:
    return np.array(x.shape, np.int32)


@operation("fill")
def fill(arith: Arithmetic, shape: Any, value: Any = 0.0) -> np.ndarray:
    return np.full(ints(shape), value)


@operation("range_1d")
def range_1d(arith: Arithmetic, start: Any, end: Any, step: Any) -> np.ndarray:
    return np.arange(start, end, step)


@operation("band_part")
def band_part(arith: Arithmetic, x: np.ndarray, lower: Any = -1, upper: Any = -1) -> np.ndarray:
    """Keeps `lower` diagonals below the main one and `upper` above; -1 keeps all."""
    rows, columns = np.indices(x.shape[-2:])
    kept = ((int(lower) < 0) | (rows - columns <= int(lower))) & (
        (int(upper) < 0) | (columns - rows <= int(upper))
    )
    return np.where(kept, x, 0)

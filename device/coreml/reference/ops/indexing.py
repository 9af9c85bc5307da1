"""Gathers, slices, and writes into slices. Indices are checked: what the runtime leaves undefined is an error here."""

from __future__ import annotations

from typing import Any

import numpy as np

from common.errors import PredictionError
from device.coreml.reference.arithmetic import Arithmetic
from device.coreml.reference.ops.registry import ints, operation


def slices(
    shape: tuple[int, ...],
    begin: Any,
    end: Any,
    stride: Any = None,
    begin_mask: Any = None,
    end_mask: Any = None,
    squeeze_mask: Any = None,
) -> tuple[Any, ...]:
    """MIL's begin / end / stride / masks as a NumPy index. Out-of-range bounds are refused, not clipped."""
    index: list[Any] = []
    for axis, n in enumerate(shape):
        step = 1 if stride is None else int(stride[axis])
        first, last = int(begin[axis]), int(end[axis])
        if squeeze_mask is not None and squeeze_mask[axis]:
            if not -n <= first < n:
                raise PredictionError(f"index {first} on axis {axis} is outside 0..{n - 1}")
            index.append(first)
            continue
        start = None if begin_mask is not None and begin_mask[axis] else first
        stop = None if end_mask is not None and end_mask[axis] else last
        for bound in (start, stop):
            if bound is not None and not -n <= bound <= n:
                raise PredictionError(f"slice {first}:{last} on axis {axis} is outside 0..{n}")
        index.append(slice(start, stop, step))
    return tuple(index)


@operation("slice_by_index")
def slice_by_index(arith: Arithmetic, x: np.ndarray, **bounds: Any) -> np.ndarray:
    return x[slices(x.shape, **bounds)]


@operation("slice_by_size")
def slice_by_size(arith: Arithmetic, x: np.ndarray, begin: Any, size: Any) -> np.ndarray:
    end = [n if s == -1 else b + s for n, b, s in zip(x.shape, ints(begin), ints(size), strict=True)]
    return x[slices(x.shape, begin, end)]


@operation("slice_update")
def slice_update(arith: Arithmetic, x: np.ndarray, update: np.ndarray, **bounds: Any) -> np.ndarray:
    index = slices(x.shape, **bounds)
    if x[index].shape != update.shape:
        raise PredictionError(
            f"slice_update: a slice of shape {x[index].shape} got an update of {update.shape}"
        )
    y = np.array(x, copy=True)
    y[index] = update
    return y


@operation("gather")
def gather(
    arith: Arithmetic,
    x: np.ndarray,
    indices: np.ndarray,
    axis: Any = 0,
    batch_dims: Any = 0,
    validate_indices: Any = False,
) -> np.ndarray:
    axis, n_batch = int(axis) % x.ndim, int(batch_dims)
    _check_indices("gather", indices, x.shape[axis])
    if n_batch == 0:
        return np.take(x, indices, axis=axis)
    lead = x.shape[:n_batch]
    pairs = zip(x.reshape(-1, *x.shape[n_batch:]), indices.reshape(-1, *indices.shape[n_batch:]), strict=True)
    rows = [np.take(row, index, axis=axis - n_batch) for row, index in pairs]
    return np.stack(rows).reshape(*lead, *rows[0].shape)


@operation("gather_along_axis")
def gather_along_axis(
    arith: Arithmetic, x: np.ndarray, indices: np.ndarray, axis: Any = 0, validate_indices: Any = False
) -> np.ndarray:
    _check_indices("gather_along_axis", indices, x.shape[int(axis)])
    return np.take_along_axis(x, indices.astype(np.int64), int(axis))


@operation("gather_nd")
def gather_nd(
    arith: Arithmetic, x: np.ndarray, indices: np.ndarray, batch_dims: Any = 0, validate_indices: Any = False
) -> np.ndarray:
    if int(batch_dims):
        raise PredictionError("gather_nd with batch_dims is not implemented by the interpreter")
    for axis in range(indices.shape[-1]):
        _check_indices("gather_nd", indices[..., axis], x.shape[axis])
    return x[tuple(np.moveaxis(indices, -1, 0))]


def _check_indices(name: str, indices: np.ndarray, n: int) -> None:
    low, high = (int(indices.min()), int(indices.max())) if indices.size else (0, 0)
    if low < -n or high >= n:
        raise PredictionError(f"{name}: index {low if low < -n else high} is outside 0..{n - 1}")

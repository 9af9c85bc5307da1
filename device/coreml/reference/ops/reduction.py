"""Reductions: sums go through the arithmetic's accumulator; maxima and positions are exact."""

from __future__ import annotations

from typing import Any

import numpy as np

from device.coreml.reference.arithmetic import F32, Arithmetic, wide
from device.coreml.reference.ops.registry import axes_of, operation


@operation("reduce_max")
def reduce_max(arith: Arithmetic, x: np.ndarray, axes: Any = None, keep_dims: Any = False) -> np.ndarray:
    return x.max(axis=axes_of(axes, x.ndim), keepdims=bool(keep_dims))


@operation("reduce_min")
def reduce_min(arith: Arithmetic, x: np.ndarray, axes: Any = None, keep_dims: Any = False) -> np.ndarray:
    return x.min(axis=axes_of(axes, x.ndim), keepdims=bool(keep_dims))


@operation("reduce_sum")
def reduce_sum(arith: Arithmetic, x: np.ndarray, axes: Any = None, keep_dims: Any = False) -> np.ndarray:
    return arith.sum(x, axes_of(axes, x.ndim), bool(keep_dims))


@operation("reduce_mean")
def reduce_mean(arith: Arithmetic, x: np.ndarray, axes: Any = None, keep_dims: Any = False) -> np.ndarray:
    over = axes_of(axes, x.ndim)
    count = F32(np.prod([x.shape[axis] for axis in over]))
    return wide(arith.sum(x, over, bool(keep_dims))) / count


@operation("reduce_sum_square")
def reduce_sum_square(
    arith: Arithmetic, x: np.ndarray, axes: Any = None, keep_dims: Any = False
) -> np.ndarray:
    squares = arith.round(wide(x) ** 2, x.dtype)
    return arith.sum(squares, axes_of(axes, x.ndim), bool(keep_dims))


@operation("reduce_argmax")
def reduce_argmax(
    arith: Arithmetic, x: np.ndarray, axis: Any = -1, keep_dims: Any = False, output_dtype: str = "int32"
) -> np.ndarray:
    return np.argmax(x, axis=int(axis), keepdims=bool(keep_dims))


@operation("topk")
def topk(
    arith: Arithmetic,
    x: np.ndarray,
    k: Any = 1,
    axis: Any = -1,
    ascending: Any = False,
    sort: Any = True,
    return_indices: Any = True,
    output_indices_dtype: str = "int32",
) -> list[np.ndarray]:
    """Values and positions of the k largest (or smallest) along an axis; the lower position wins ties."""
    key = x if ascending else -wide(x)
    order = np.take(np.argsort(key, axis=int(axis), kind="stable"), np.arange(int(k)), int(axis))
    return [np.take_along_axis(x, order, int(axis)), order]


@operation("cumsum")
def cumsum(
    arith: Arithmetic, x: np.ndarray, axis: Any = 0, exclusive: Any = False, reverse: Any = False
) -> np.ndarray:
    axis = int(axis)
    y = np.flip(wide(x), axis) if reverse else wide(x)
    total = np.cumsum(y, axis=axis, dtype=y.dtype)
    if exclusive:
        total = total - y
    return np.flip(total, axis) if reverse else total

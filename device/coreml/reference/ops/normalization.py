"""Soft-max and normalisations. Their inner values are fp32, their long sums go through the accumulator."""

from __future__ import annotations

from typing import Any

import numpy as np

from device.coreml.reference.arithmetic import F32, Arithmetic, wide
from device.coreml.reference.ops.registry import axes_of, operation


@operation("softmax")
def softmax(arith: Arithmetic, x: np.ndarray, axis: Any = -1) -> np.ndarray:
    axis = int(axis) % x.ndim
    exponentials = arith.round(np.exp(wide(x) - wide(x.max(axis=axis, keepdims=True))), x.dtype)
    return wide(exponentials) / wide(arith.sum(exponentials, (axis,), keep_dims=True))


@operation("layer_norm")
def layer_norm(
    arith: Arithmetic,
    x: np.ndarray,
    axes: Any = None,
    gamma: np.ndarray | None = None,
    beta: np.ndarray | None = None,
    epsilon: Any = 1e-5,
) -> np.ndarray:
    over = axes_of(axes, x.ndim)
    shape = [x.shape[axis] if axis in over else 1 for axis in range(x.ndim)]
    centred = wide(x) - wide(x).mean(axis=over, keepdims=True)
    y = centred / np.sqrt((centred**2).mean(axis=over, keepdims=True) + F32(epsilon))
    if gamma is not None:
        y = y * wide(gamma).reshape(shape)
    return y if beta is None else y + wide(beta).reshape(shape)


@operation("l2_norm")
def l2_norm(arith: Arithmetic, x: np.ndarray, epsilon: Any = 1e-6) -> np.ndarray:
    """Divides by the length of the last three axes, as MIL defines it."""
    length = np.sqrt((wide(x) ** 2).sum(axis=(-3, -2, -1), keepdims=True) + F32(epsilon))
    return wide(x) / length


@operation("batch_norm")
def batch_norm(
    arith: Arithmetic,
    x: np.ndarray,
    mean: np.ndarray,
    variance: np.ndarray,
    gamma: np.ndarray | None = None,
    beta: np.ndarray | None = None,
    epsilon: Any = 1e-5,
) -> np.ndarray:
    shape = (1, -1) + (1,) * (x.ndim - 2)
    y = (wide(x) - wide(mean).reshape(shape)) / np.sqrt(wide(variance).reshape(shape) + F32(epsilon))
    if gamma is not None:
        y = y * wide(gamma).reshape(shape)
    return y if beta is None else y + wide(beta).reshape(shape)

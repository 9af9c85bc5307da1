"""Contractions: matmul, linear, convolution, einsum, attention. All add through the arithmetic's accumulator."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from common.errors import PackageError
from device.coreml.reference.arithmetic import F32, Arithmetic, wide
from device.coreml.reference.ops.normalization import softmax
from device.coreml.reference.ops.registry import ints, operation


@operation("matmul")
def matmul(
    arith: Arithmetic, x: np.ndarray, y: np.ndarray, transpose_x: Any = False, transpose_y: Any = False
) -> np.ndarray:
    x = np.swapaxes(x, -1, -2) if transpose_x else x
    y = np.swapaxes(y, -1, -2) if transpose_y else y
    return arith.matmul(x, y)


@operation("linear")
def linear(
    arith: Arithmetic, x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None = None
) -> np.ndarray:
    y = arith.matmul(x, np.swapaxes(weight, -1, -2))
    return y if bias is None else wide(y) + wide(bias)


@operation("conv")
def conv(
    arith: Arithmetic,
    x: np.ndarray,
    weight: np.ndarray,
    bias: np.ndarray | None = None,
    strides: Any = None,
    pad_type: str = "valid",
    pad: Any = None,
    dilations: Any = None,
    groups: Any = 1,
) -> np.ndarray:
    """x [N, C, *spatial], weight [C_out, C / groups, *kernel]. The bias is added to the rounded sum."""
    rank = x.ndim - 2
    ones = (1,) * rank
    steps, gaps = (ones if given is None else ints(given) for given in (strides, dilations))
    x = _padded(x, weight.shape[2:], steps, gaps, pad_type, pad)
    columns, spatial = _columns(x, weight.shape[2:], steps, gaps, int(groups))
    n_out = weight.shape[0]
    kernels = weight.reshape(
        int(groups), n_out // int(groups), -1
    )  # [groups, C_out / groups, C / groups * kernel]
    y = arith.matmul(np.broadcast_to(kernels, (x.shape[0], *kernels.shape)), columns)
    y = y.reshape(x.shape[0], n_out, *spatial)
    return y if bias is None else wide(y) + wide(bias).reshape(1, -1, *(1,) * rank)


def _padded(
    x: np.ndarray, kernel: tuple[int, ...], steps: Any, gaps: Any, pad_type: str, pad: Any
) -> np.ndarray:
    if pad_type == "valid":
        return x
    if pad_type == "custom":
        amounts = np.asarray(pad).reshape(-1, 2).tolist()
    elif pad_type in ("same", "same_lower"):
        amounts = []
        for n, k, step, gap in zip(x.shape[2:], kernel, steps, gaps, strict=True):
            total = max((math.ceil(n / step) - 1) * step + (k - 1) * gap + 1 - n, 0)
            low = total // 2 if pad_type == "same" else total - total // 2
            amounts.append((low, total - low))
    else:
        raise PackageError(f"conv pad_type {pad_type!r}; known: valid, custom, same, same_lower")
    return np.pad(x, [(0, 0), (0, 0), *map(tuple, amounts)])


def _columns(
    x: np.ndarray, kernel: tuple[int, ...], steps: Any, gaps: Any, groups: int
) -> tuple[np.ndarray, tuple[int, ...]]:
    """[N, groups, C / groups * kernel, positions] and the output's spatial shape. A 1x1 kernel costs no copy."""
    n, c = x.shape[:2]
    if all(k == 1 for k in kernel) and all(step == 1 for step in steps):
        return x.reshape(n, groups, c // groups, -1), x.shape[2:]
    reach = [(k - 1) * gap + 1 for k, gap in zip(kernel, gaps, strict=True)]
    axes = tuple(range(2, x.ndim))
    windows = np.lib.stride_tricks.sliding_window_view(x, reach, axis=axes)
    windows = windows[(slice(None), slice(None), *(slice(None, None, step) for step in steps))]
    windows = windows[(..., *(slice(None, None, gap) for gap in gaps))]
    spatial = windows.shape[2 : x.ndim]
    order = (0, 1, *range(x.ndim, windows.ndim), *axes)
    return windows.transpose(order).reshape(n, groups, c // groups * math.prod(kernel), -1), spatial


@operation("einsum")
def einsum(arith: Arithmetic, values: list[np.ndarray], equation: str) -> np.ndarray:
    """Two operands, one contraction; brought to a matmul so that the accumulator applies."""
    left, right, out = equation.replace(" ", "").replace("->", ",").split(",")
    shared = [i for i in left if i in right]
    batch, summed = [i for i in shared if i in out], [i for i in shared if i not in out]
    rows, columns = [i for i in left if i not in shared], [i for i in right if i not in shared]
    sizes = dict(zip(left + right, values[0].shape + values[1].shape, strict=True))

    def arranged(array: np.ndarray, labels: str, first: list[str], last: list[str]) -> np.ndarray:
        moved = array.transpose([labels.index(i) for i in batch + first + last])
        head = [sizes[i] for i in batch]
        return moved.reshape(*head, math.prod(sizes[i] for i in first), math.prod(sizes[i] for i in last))

    product = arith.matmul(
        arranged(values[0], left, rows, summed), arranged(values[1], right, summed, columns)
    )
    labels = batch + rows + columns
    return product.reshape([sizes[i] for i in labels]).transpose([labels.index(i) for i in out])


@operation("scaled_dot_product_attention")
def scaled_dot_product_attention(
    arith: Arithmetic,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    attn_mask: np.ndarray | None = None,
) -> np.ndarray:
    """query [..., n, d], key and value [..., m, d]; a boolean mask allows, a float mask is added."""
    scale = F32(1 / math.sqrt(query.shape[-1]))
    scores = wide(arith.matmul(arith.round(wide(query) * scale, query.dtype), np.swapaxes(key, -1, -2)))
    if attn_mask is not None:
        added = np.where(attn_mask, F32(0), F32(-np.inf)) if attn_mask.dtype == bool else wide(attn_mask)
        scores = scores + added
    weights = softmax(arith, arith.round(scores, query.dtype), -1)
    return arith.matmul(arith.round(weights, query.dtype), value)

"""How fp16 hardware may add: the accumulator of contractions and sums, and what happens to subnormal numbers.

The Neural Engine's accumulator is not documented, so an artefact must be right under each of these:

    fp32       products and sums in fp32, one rounding to fp16 at the end             (the optimistic engine)
    blockN     fp32 inside blocks of N along the contraction, fp16 from block to block (a tiled engine)
    in-order   every product added to an fp16 register, one after the other            (the worst case)

Element-wise operations are computed in fp32 and rounded once. For + - * / and square roots that equals a correctly
rounded fp16 operation, because fp32 carries at least twice the digits plus two (Figueroa, 1995).
Knows nothing of programs and packages. Called by the operations.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from common.errors import SettingError

F16, F32 = np.float16, np.float32
SUBNORMAL_LIMIT = np.float32(2.0**-14)
"""Below this magnitude fp16 numbers are subnormal."""
BLOCK_MAX = 1 << 16


@dataclass(frozen=True)
class Arithmetic:
    """One assumption about the hardware. `accumulator`: fp32, blockN or in-order; `subnormals`: kept or flushed."""

    accumulator: str = "fp32"
    subnormals: str = "kept"

    def __post_init__(self) -> None:
        if self.accumulator not in ("fp32", "in-order") and not 1 <= self._block_size() <= BLOCK_MAX:
            raise SettingError(
                f"accumulator {self.accumulator!r}: use fp32, in-order, or blockN with N from 1 to {BLOCK_MAX}"
            )
        if self.subnormals not in ("kept", "flushed"):
            raise SettingError(f"subnormals {self.subnormals!r}: use kept or flushed")

    @property
    def flushes(self) -> bool:
        return self.subnormals == "flushed"

    def __str__(self) -> str:
        return f"{self.accumulator}, subnormals {self.subnormals}"

    def _block_size(self) -> int:
        match = re.fullmatch(r"block([0-9]+)", self.accumulator)
        return int(match[1]) if match else 0

    def round(self, x: np.ndarray, dtype: np.dtype) -> np.ndarray:
        """Round a result to its declared type; fp16 overflow becomes infinity, as on the hardware."""
        y = np.asarray(x).astype(dtype, copy=False)
        return self.flush(y) if dtype == F16 else y

    def flush(self, x: np.ndarray) -> np.ndarray:
        """Replace fp16 subnormals by zero where this arithmetic flushes them."""
        if not self.flushes or x.dtype != F16:
            return x
        return np.where(np.abs(x) < SUBNORMAL_LIMIT, F16(0), x)

    def matmul(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """a [..., M, K] times b [..., K, N]. fp16 operands go through the accumulator; returns fp16 or fp32 alike."""
        if a.dtype != F16 or self.accumulator == "fp32":
            return self.round(np.matmul(wide(a), wide(b)), a.dtype)
        if self.accumulator == "in-order":
            return self._matmul_in_order(wide(a), wide(b))
        n, k = self._block_size(), a.shape[-1]
        total = self.round(np.matmul(wide(a[..., :n]), wide(b[..., :n, :])), F16)
        for start in range(n, k, n):
            part = np.matmul(wide(a[..., start : start + n]), wide(b[..., start : start + n, :]))
            total = self.round(wide(total) + wide(self.round(part, F16)), F16)
        return total

    def _matmul_in_order(self, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        total = self.round(a[..., :, :1] * b[..., :1, :], F16)
        for k in range(1, a.shape[-1]):
            total = self.round(wide(total) + a[..., :, k : k + 1] * b[..., k : k + 1, :], F16)
        return total

    def sum(self, x: np.ndarray, axes: tuple[int, ...], keep_dims: bool) -> np.ndarray:
        """Sum over `axes` through the accumulator; integers are summed exactly."""
        if not np.issubdtype(x.dtype, np.floating):
            return x.sum(axis=axes, keepdims=keep_dims, dtype=x.dtype)
        kept = [axis for axis in range(x.ndim) if axis not in axes]
        n_kept = int(np.prod([x.shape[axis] for axis in kept], dtype=np.int64))
        rows = np.transpose(x, [*kept, *axes]).reshape(n_kept, -1)
        total = self.matmul(rows, np.ones((rows.shape[-1], 1), x.dtype))[:, 0]
        shape = [1 if axis in axes else n for axis, n in enumerate(x.shape)]
        return total.reshape(shape if keep_dims else [x.shape[axis] for axis in kept])


def wide(x: np.ndarray) -> np.ndarray:
    """fp16 as fp32; everything else unchanged. Operations compute on wide values and are rounded by the runner."""
    return x.astype(F32) if x.dtype == F16 else x

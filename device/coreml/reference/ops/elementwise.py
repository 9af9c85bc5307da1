"""Element-wise operations: computed in fp32 where the operands are fp16, rounded once by the runner."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from common.errors import PackageError
from device.coreml.reference.arithmetic import F32, Arithmetic, wide
from device.coreml.reference.ops.registry import operation

BINARY = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "maximum": np.maximum, "minimum": np.minimum,
    "pow": np.power, "mod": np.mod, "equal": np.equal, "not_equal": np.not_equal, "greater": np.greater,
    "greater_equal": np.greater_equal, "less": np.less, "less_equal": np.less_equal,
    "logical_and": np.logical_and, "logical_or": np.logical_or, "logical_xor": np.logical_xor,
}  # fmt: skip
UNARY = {
    "abs": np.abs, "ceil": np.ceil, "cos": np.cos, "exp": np.exp, "exp2": np.exp2, "floor": np.floor,
    "round": np.rint, "sign": np.sign, "sin": np.sin, "sqrt": np.sqrt, "square": np.square, "tanh": np.tanh,
    "logical_not": np.logical_not, "identity": lambda x: x, "relu": lambda x: np.maximum(x, 0),
}  # fmt: skip
CASTS = {
    "fp16": np.float16, "fp32": np.float32, "int8": np.int8, "uint8": np.uint8, "int16": np.int16,
    "uint16": np.uint16, "int32": np.int32, "bool": np.bool_,
}  # fmt: skip


def _binary(function: Any) -> Any:
    return lambda arith, x, y: function(wide(x), wide(y))


def _unary(function: Any) -> Any:
    return lambda arith, x: function(wide(x))


for _name, _function in BINARY.items():
    operation(_name)(_binary(_function))
for _name, _function in UNARY.items():
    operation(_name)(_unary(_function))


@operation("real_div")
def real_div(arith: Arithmetic, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.divide(wide(x), wide(y))


@operation("floor_div")
def floor_div(arith: Arithmetic, x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.floor_divide(wide(x), wide(y))


@operation("log")
def log(arith: Arithmetic, x: np.ndarray, epsilon: Any = 0.0) -> np.ndarray:
    return np.log(wide(x) + F32(epsilon))


@operation("rsqrt")
def rsqrt(arith: Arithmetic, x: np.ndarray, epsilon: Any = 0.0) -> np.ndarray:
    return 1 / np.sqrt(wide(x) + F32(epsilon))


@operation("inverse")
def inverse(arith: Arithmetic, x: np.ndarray, epsilon: Any = 0.0) -> np.ndarray:
    return 1 / (wide(x) + F32(epsilon))


@operation("sigmoid")
def sigmoid(arith: Arithmetic, x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-wide(x)))


@operation("silu")
def silu(arith: Arithmetic, x: np.ndarray) -> np.ndarray:
    return wide(x) / (1 + np.exp(-wide(x)))


@operation("softplus")
def softplus(arith: Arithmetic, x: np.ndarray) -> np.ndarray:
    return np.logaddexp(wide(x), F32(0))


@operation("gelu")
def gelu(arith: Arithmetic, x: np.ndarray, mode: str = "EXACT") -> np.ndarray:
    """The three forms that MIL names: by the error function, by tanh, by a sigmoid."""
    x = wide(x)
    if mode == "TANH_APPROXIMATION":
        return x * (1 + np.tanh(F32(math.sqrt(2 / math.pi)) * (x + F32(0.044715) * x**3))) / 2
    if mode == "SIGMOID_APPROXIMATION":
        return x / (1 + np.exp(F32(-1.702) * x))
    if mode != "EXACT":
        raise PackageError(f"gelu mode {mode!r}; known: EXACT, TANH_APPROXIMATION, SIGMOID_APPROXIMATION")
    erf = np.vectorize(math.erf, otypes=[np.float64])
    return x * (1 + erf(x / math.sqrt(2))).astype(F32) / 2


@operation("clip")
def clip(arith: Arithmetic, x: np.ndarray, alpha: Any, beta: Any) -> np.ndarray:
    return np.clip(wide(x), alpha, beta)


@operation("select")
def select(arith: Arithmetic, cond: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.where(cond, a, b)


@operation("cast")
def cast(arith: Arithmetic, x: np.ndarray, dtype: str) -> np.ndarray:
    if dtype not in CASTS:
        raise PackageError(f"cast to {dtype!r}; known: {', '.join(CASTS)}")
    return np.asarray(x).astype(CASTS[dtype])

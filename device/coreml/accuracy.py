"""How exact a page program is: against float64, for each kind of score and each assumption about the hardware.

    for result in measure(geometry, folder):  ...

The cases are synthetic and named for what they do to fp16: the real accumulator of the Neural Engine is not documented,
so a bound is stated for each assumption instead of one number that may not hold. Runs a saved package through the
interpreter; nothing here ran on Apple hardware. Called by `pages accuracy`, tests, and docs/frozen-pages.md's figures.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from device.coreml.geometry import PageGeometry
from device.coreml.page_program import PagePartial, pack_queries, unpack_partials
from device.coreml.page_rows import GGML_F16, PageConstants
from device.coreml.page_writer import write_page
from device.coreml.reference import Arithmetic, Program
from device.coreml.template import find_template
from device.coreml.threads import one_blas_thread

ARITHMETICS = tuple(
    Arithmetic(accumulator, subnormals)
    for accumulator in ("fp32", "block64", "in-order")
    for subnormals in ("kept", "flushed")
)


BOUNDS = {"fp32": (1e-2, 1e-2), "block64": (3e-2, 3e-2), "in-order": (1e-1, 1e-1)}
"""Accumulator -> (worst row's relative output error, worst error of a log-sum-exp) over all cases, centred or not,
subnormals kept or flushed. A quarter or more above the worst figure found over five geometries and three seeds, and on
real text by `outrigger verify --frozen` (which found the worst one for blocks of 64: 2.0e-2, Gemma 3)."""


@dataclass(frozen=True)
class Inputs:
    """One case: scaled queries f32 [n_head_kv, n_rows, head_dim], K and V f16 [n_head_kv, n_keys, head_dim]."""

    queries: np.ndarray
    k: np.ndarray
    v: np.ndarray


@dataclass(frozen=True)
class Accuracy:
    """Errors of one case under one arithmetic; `first` is the call without a centre, `later` with the last maximum."""

    case: str
    arithmetic: Arithmetic
    o_first: float
    lse_first: float
    o_later: float
    lse_later: float


def make_inputs(case: str, geometry: PageGeometry, n_keys: int | None = None, seed: int = 0) -> Inputs:
    """K, V and queries of a case. Rows of K and of q have unit mean square, as after q/k-norm; V is N(0, 1)."""
    rng = np.random.default_rng(seed)
    heads, n = geometry.n_head_kv, n_keys or geometry.page_tokens
    q = _unit(rng.standard_normal((heads, geometry.n_rows, geometry.head_dim_k), dtype=np.float32))
    k = _unit(rng.standard_normal((heads, n, geometry.head_dim_k), dtype=np.float32))
    v = rng.standard_normal((heads, n, geometry.head_dim_v), dtype=np.float32)
    q, k, v = CASES[case](q, k, v, rng)
    scale = np.float32(geometry.head_dim_k**-0.5)
    return Inputs(np.asarray(q * scale), k.astype(np.float16), v.astype(np.float16))


def _unit(x: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True))


def _smooth(q: np.ndarray, k: np.ndarray, v: np.ndarray, rng: np.random.Generator) -> tuple[np.ndarray, ...]:
    """Keys share a direction, as in real heads, and half the queries look along it."""
    direction = _unit(rng.standard_normal(k.shape[-1:], dtype=np.float32))
    q[:, ::2] += direction
    return _unit(q), _unit(k + direction), v


def _sink(q: np.ndarray, k: np.ndarray, v: np.ndarray, _: np.random.Generator) -> tuple[np.ndarray, ...]:
    """One key outscores the others by 11 for every row, as the first token of a text does."""
    towards = q.mean(axis=1, keepdims=True)  # [heads, 1, d]
    score = (q @ towards.swapaxes(1, 2)).mean(axis=1, keepdims=True) / np.sqrt(q.shape[-1])
    k[:, 5] = (towards / score * 11)[:, 0]
    return q, k, v


def _outliers(q: np.ndarray, k: np.ndarray, v: np.ndarray, _: np.random.Generator) -> tuple[np.ndarray, ...]:
    """One channel of V is twenty times the others, another has an offset of 12."""
    v[..., 7] *= 20
    v[..., 19] += 12
    return q, k, v


CASES: dict[str, Callable[..., tuple[np.ndarray, ...]]] = {
    "realistic": lambda q, k, v, rng: (q, k, v),  # scores N(0, 1)
    "smooth": _smooth,
    "peaky": lambda q, k, v, rng: (3 * q, k, v),  # scores N(0, 3)
    "very peaky": lambda q, k, v, rng: (6 * q, k, v),  # scores N(0, 6): a handful of keys win
    "sink": _sink,
    "all equal": lambda q, k, v, rng: (q, np.broadcast_to(k[:, :1], k.shape), v + 3),
    "outliers in V": _outliers,
}
"""Each takes and returns (queries, K, V)."""


def attend_float64(inputs: Inputs) -> tuple[np.ndarray, np.ndarray]:
    """The oracle: normalised outputs [n_head_kv, n_rows, head_dim_v] and log-sum-exp [n_head_kv, n_rows]."""
    with one_blas_thread():
        scores = inputs.queries.astype(np.float64) @ inputs.k.astype(np.float64).swapaxes(-1, -2)
        top = scores.max(axis=-1, keepdims=True)
        weights = np.exp(scores - top)
        total = weights.sum(axis=-1, keepdims=True)
        return weights / total @ inputs.v.astype(np.float64), (top + np.log(total))[..., 0]


def constants_of(geometry: PageGeometry, inputs: Inputs, into: PageConstants | None = None) -> PageConstants:
    """A page's constants from the case's K and V, through the same rows as the product."""
    constants = into or PageConstants.allocate(geometry)
    n_keys = inputs.k.shape[1]
    k_rows, v_rows = (
        np.ascontiguousarray(x.transpose(1, 0, 2)).reshape(n_keys, -1).view(np.uint8)
        for x in (inputs.k, inputs.v)
    )
    constants.fill(k_rows, v_rows, GGML_F16)
    return constants


def ask(
    program: Program, geometry: PageGeometry, queries: np.ndarray, centre: np.ndarray | None = None
) -> PagePartial:
    """One call of a page through the interpreter."""
    outputs = program.predict({"queries": pack_queries(geometry, queries, centre)})
    return unpack_partials(geometry, outputs, queries.shape[1], centre)


def row_errors(partial: PagePartial, oracle: tuple[np.ndarray, np.ndarray]) -> tuple[float, float]:
    """Relative L2 error of the worst row's output, and the largest error of a log-sum-exp."""
    out, lse = oracle
    found = partial.o.astype(np.float64) / partial.l[..., None]
    worst = np.linalg.norm(found - out, axis=-1) / np.linalg.norm(out, axis=-1)
    return float(worst.max()), float(np.abs(partial.m + np.log(partial.l.astype(np.float64)) - lse).max())


def measure(
    geometry: PageGeometry,
    folder: Path,
    cases: Sequence[str] = tuple(CASES),
    arithmetics: Sequence[Arithmetic] = ARITHMETICS,
    seed: int = 0,
) -> Iterator[Accuracy]:
    """Write a page of each case in `folder` and ask it twice under each arithmetic: uncentred, then centred."""
    template, constants = find_template(geometry, folder), PageConstants.allocate(geometry)
    path = folder / "accuracy.mlpackage"
    for case in cases:
        inputs = make_inputs(case, geometry, seed=seed)
        oracle = attend_float64(inputs)
        write_page(template, constants_of(geometry, inputs, constants), path, slot=path)
        program = Program.load(path)
        for arithmetic in arithmetics:
            program.arithmetic = arithmetic
            first = ask(program, geometry, inputs.queries)
            later = ask(program, geometry, inputs.queries, first.m)
            yield Accuracy(case, arithmetic, *row_errors(first, oracle), *row_errors(later, oracle))

"""The program of one page: partial attention of a block of queries over K and V held as constants.

For each KV head and each chunk of keys, all in fp16, channels first (the layout the Neural Engine computes in):

    s = [K | 1] [q; -c] + bias        1x1 convolution; c is the row's maximum of the previous call
    m = max(s) - headroom             per row; see PageGeometry.headroom
    e = exp(s - m)
    l = sum(e)
    p = e * (gain / l)                the gain is folded into the division, so that nothing underflows first
    o = V^T p                         1x1 convolution: gain times the chunk's normalised output

Centring inside the convolution keeps scores near zero, where fp16 has digits. (o, m, l) of every chunk go back as they
are: the caller merges them and takes the logarithm in fp32, because an fp16 log-sum-exp is 8 times less exact.
Called by template (to build), and by whoever asks a page (`pack_queries`, `unpack_partials`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from common.errors import EngineError
from device.coreml import toolchain
from device.coreml.geometry import GAIN, PageGeometry

QUERIES, OUT, MAX, SUM = "queries", "o", "m", "l"
CENTRE_MAX = 4096.0
"""Centres are kept within this: with the mask's -60,000 and any real score the sum stays finite in fp16."""


class PagePartial(NamedTuple):
    """Accumulator of queries over one page: the row maximum, Σ exp(s − m), and the unnormalised output."""

    m: np.ndarray  # f32 [n_head_kv, n_rows]
    l: np.ndarray  # f32 [n_head_kv, n_rows]  # noqa: E741 (the field's name for it)
    o: np.ndarray  # f32 [n_head_kv, n_rows, head_dim_v]


def page_program(geometry: PageGeometry, constants: dict[str, np.ndarray]) -> Any:
    """The MIL program of a page, for `toolchain.save_program`. `constants` as PageGeometry.constants names them."""
    mb, types, ct = toolchain.builder(), toolchain.mil_types(), toolchain.coremltools()
    spec = mb.TensorSpec(geometry.query_shape, types.fp16)

    @mb.program(input_specs=[spec], opset_version=ct.target.iOS18)
    def program(queries: Any) -> tuple[Any, ...]:
        per_head = mb.split(x=queries, num_splits=geometry.n_head_kv, axis=1, name="queries_of")
        if geometry.n_head_kv == 1:
            per_head = (per_head,)
        shared = [
            mb.const(val=constants[f"bias_{chunk}"], name=f"bias_{chunk}")
            for chunk in range(geometry.n_chunks)
        ]
        partials = [
            _chunk(mb, geometry, constants, per_head[head], shared[chunk], f"{head}_{chunk}")
            for head in range(geometry.n_head_kv)
            for chunk in range(geometry.n_chunks)
        ]
        return tuple(
            mb.concat(values=list(values), axis=1, name=name)
            for name, values in zip((OUT, MAX, SUM), zip(*partials, strict=True), strict=True)
        )

    return program


def _chunk(
    mb: Any, geometry: PageGeometry, constants: dict[str, np.ndarray], queries: Any, bias: Any, key: str
) -> tuple[Any, Any, Any]:
    """The operations of one head and one chunk; see the head of this file."""
    weight_k = mb.const(val=constants[f"k_{key}"], name=f"k_{key}")
    weight_v = mb.const(val=constants[f"v_{key}"], name=f"v_{key}")
    scores = mb.conv(x=queries, weight=weight_k, bias=bias, name=f"scores_{key}")
    top = mb.reduce_max(x=scores, axes=[1], keep_dims=True, name=f"top_{key}")
    m = mb.sub(x=top, y=np.float16(geometry.headroom), name=f"m_{key}")
    e = mb.exp(x=mb.sub(x=scores, y=m, name=f"below_{key}"), name=f"e_{key}")
    l = mb.reduce_sum(x=e, axes=[1], keep_dims=True, name=f"l_{key}")  # noqa: E741
    share = mb.real_div(x=np.float16(GAIN), y=l, name=f"share_{key}")
    p = mb.mul(x=e, y=share, name=f"p_{key}")
    return mb.conv(x=p, weight=weight_v, name=f"o_{key}"), m, l


def pack_queries(geometry: PageGeometry, queries: np.ndarray, centre: np.ndarray | None) -> np.ndarray:
    """Scaled queries f32 or f16 [n_head_kv, n <= n_rows, head_dim_k] and the previous maxima as the program's input.

    `centre` f32 [n_head_kv, n] is any guess of each row's maximum (None: 0). Returns f16, rows beyond n zero.
    """
    n_head_kv, n, head_dim = queries.shape
    if (n_head_kv, head_dim) != (geometry.n_head_kv, geometry.head_dim_k) or not 1 <= n <= geometry.n_rows:
        raise EngineError(f"queries of shape {queries.shape} do not fit a page program of {geometry}")
    packed = np.zeros((n_head_kv, head_dim + 1, geometry.n_rows), np.float16)
    with np.errstate(
        over="ignore"
    ):  # a query beyond fp16 comes back as infinities, which unpack_partials refuses
        packed[:, :head_dim, :n] = queries.transpose(0, 2, 1)
    packed[:, head_dim, :n] = -_centre(geometry, n, centre)
    return packed.reshape(geometry.query_shape)


def unpack_partials(
    geometry: PageGeometry, outputs: dict[str, np.ndarray], n: int, centre: np.ndarray | None
) -> PagePartial:
    """The page's accumulator for the first `n` rows, chunks merged in fp32, oldest first. `centre` as it was packed."""
    n_heads, n_chunks = geometry.n_head_kv, geometry.n_chunks
    shape = (n_heads, n_chunks, geometry.n_rows)
    m = outputs[MAX].reshape(shape)[..., :n].astype(np.float32)
    l = outputs[SUM].reshape(shape)[..., :n].astype(np.float32)  # noqa: E741
    o = outputs[OUT].reshape(n_heads, n_chunks, geometry.head_dim_v, geometry.n_rows)[..., :n]
    if not (np.isfinite(m).all() and np.isfinite(l).all() and np.isfinite(o).all()):
        raise EngineError(
            f"a page program of {geometry} returned infinities or NaN; its keys go to ordinary kernels"
        )
    top = m.max(axis=1)  # [n_heads, n]
    weight = l * np.exp(m - top[:, None])  # [n_heads, n_chunks, n]
    out = np.einsum("hcn,hcdn->hnd", weight, o.astype(np.float32)) / np.float32(GAIN)
    centred = top + _centre(geometry, n, centre).astype(np.float32)
    return PagePartial(centred, weight.sum(axis=1), out)


def _centre(geometry: PageGeometry, n: int, centre: np.ndarray | None) -> np.ndarray:
    """f16 [n_head_kv, n]: the rounded guess, the same when packing and when adding it back."""
    if centre is None:
        return np.zeros((geometry.n_head_kv, n), np.float16)
    if centre.shape != (geometry.n_head_kv, n):
        raise EngineError(f"centre of shape {centre.shape}, expected {(geometry.n_head_kv, n)}")
    return np.clip(np.nan_to_num(centre, neginf=-CENTRE_MAX), -CENTRE_MAX, CENTRE_MAX).astype(np.float16)

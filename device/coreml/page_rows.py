"""From stored KV rows to a page's constants: dequantise, transpose, cut into chunks.

Rows are as the KV cache and the journal keep them: token-major, heads side by side, f16 or q8_0. The constants are in
the order of the weight file, so that writing a page is one gather-write. Works through the page in blocks of tokens
that fit the processor's cache: a plain NumPy transpose of 16,384 rows is three times slower.
Knows nothing of files. Called by the background builder and `bench pages`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from common.errors import EngineError
from device.coreml.geometry import F16_MAX, GAIN, MASKED, PageGeometry

GGML_F16, GGML_Q8_0 = 1, 8
Q8_0_BLOCK = 32
Q8_0 = np.dtype([("scale", "<f2"), ("quants", "i1", (Q8_0_BLOCK,))])
BLOCK_TOKENS = 64
V_MAX = F16_MAX / GAIN
"""Outputs are up to gain times the largest |V|: beyond this a page could overflow and is refused."""


@dataclass(frozen=True)
class PageConstants:
    """The constants of one page; may be filled again for the next one, which saves touching fresh memory."""

    geometry: PageGeometry
    bias: np.ndarray  # f16 [n_chunks, chunk_tokens]
    k: np.ndarray  # f16 [n_head_kv, n_chunks, chunk_tokens, head_dim_k + 1], the last column is 1
    v: np.ndarray  # f16 [n_head_kv, n_chunks, head_dim_v, chunk_tokens]

    @classmethod
    def allocate(cls, geometry: PageGeometry) -> PageConstants:
        """Constants of a page without keys: every key masked."""
        g = geometry
        bias = np.full((g.n_chunks, g.chunk_tokens), MASKED, np.float16)
        k = np.zeros((g.n_head_kv, g.n_chunks, g.chunk_tokens, g.head_dim_k + 1), np.float16)
        k[..., -1] = 1
        return cls(g, bias, k, np.zeros((g.n_head_kv, g.n_chunks, g.head_dim_v, g.chunk_tokens), np.float16))

    def by_name(self) -> dict[str, np.ndarray]:
        """Views under the names of PageGeometry.constants, in that order."""
        views = {f"bias_{chunk}": bias for chunk, bias in enumerate(self.bias)}
        for head in range(self.geometry.n_head_kv):
            for chunk in range(self.geometry.n_chunks):
                views[f"k_{head}_{chunk}"] = self.k[head, chunk][:, :, None, None]
                views[f"v_{head}_{chunk}"] = self.v[head, chunk][:, :, None, None]
        return views

    def fill(self, k_rows: np.ndarray, v_rows: np.ndarray, ggml_type: int) -> None:
        """Fill from stored rows u8 [n_keys, row_bytes] of K and of V; keys from n_keys on are masked.

        Raises EngineError for shapes or types that do not fit, and for values a page program cannot hold (not finite,
        or |V| above 255): such keys stay with the ordinary kernels.
        """
        g = self.geometry
        n_keys = k_rows.shape[0]
        if v_rows.shape[0] != n_keys or not 1 <= n_keys <= g.page_tokens:
            raise EngineError(
                f"{n_keys} K rows and {v_rows.shape[0]} V rows; a page takes 1 to {g.page_tokens} of both"
            )
        k_heads = _heads(k_rows, g.n_head_kv, g.head_dim_k, ggml_type, "K")
        v_heads = _heads(v_rows, g.n_head_kv, g.head_dim_v, ggml_type, "V")
        for first in range(0, n_keys, BLOCK_TOKENS):
            last = min(first + BLOCK_TOKENS, n_keys)
            chunk, at = divmod(first, g.chunk_tokens)  # blocks never straddle: chunks are multiples of 256
            here = slice(at, at + last - first)
            self.k[:, chunk, here, :-1] = _f16(k_heads[first:last]).transpose(1, 0, 2)
            self.v[:, chunk, :, here] = _f16(v_heads[first:last]).transpose(1, 2, 0)
        self._mask(n_keys)
        self._check()

    def _mask(self, n_keys: int) -> None:
        g = self.geometry
        self.bias.reshape(-1)[:n_keys] = 0
        self.bias.reshape(-1)[n_keys:] = MASKED
        self.k.reshape(g.n_head_kv, g.page_tokens, -1)[:, n_keys:, :-1] = 0
        chunk, at = divmod(n_keys, g.chunk_tokens)
        if at:
            self.v[:, chunk, :, at:] = 0
            chunk += 1
        self.v[:, chunk:] = 0

    def _check(self) -> None:
        k_max, v_max = _largest(self.k), _largest(self.v)
        if not np.isfinite(k_max) or not v_max <= V_MAX:
            raise EngineError(
                f"largest |K| {k_max}, largest |V| {v_max}: a page program holds finite K and |V| up to {V_MAX:.0f}"
            )


def _heads(rows: np.ndarray, n_head: int, head_dim: int, ggml_type: int, what: str) -> np.ndarray:
    """View stored rows as [n, n_head, head_dim] (f16) or [n, n_head, head_dim / 32] blocks (q8_0)."""
    if ggml_type not in (GGML_F16, GGML_Q8_0) or (ggml_type == GGML_Q8_0 and head_dim % Q8_0_BLOCK):
        raise EngineError(
            f"{what} rows of ggml type {ggml_type} and head_dim {head_dim}: pages are made from f16 and q8_0"
        )
    n_elements = n_head * head_dim
    row_bytes = 2 * n_elements if ggml_type == GGML_F16 else n_elements // Q8_0_BLOCK * Q8_0.itemsize
    if rows.dtype != np.uint8 or rows.ndim != 2 or rows.shape[1] != row_bytes:
        raise EngineError(f"{what} rows {rows.dtype} {rows.shape}: expected uint8 [n, {row_bytes}]")
    typed = np.ascontiguousarray(rows).view("<f2" if ggml_type == GGML_F16 else Q8_0)
    return typed.reshape(rows.shape[0], n_head, -1)


def _f16(block: np.ndarray) -> np.ndarray:
    """f16 [n, n_head, head_dim] of a block of rows; q8_0 is scale times quant in f32, rounded once."""
    if block.dtype != Q8_0:
        return block
    values = block["quants"].astype(np.float32) * block["scale"].astype(np.float32)[..., None]
    with np.errstate(over="ignore"):
        return values.reshape(*block.shape[:2], -1).astype(np.float16)


def _largest(values: np.ndarray) -> float:
    """Largest magnitude; NaN or infinity where there is one. As integers, because fp16 comparisons are slow."""
    return float(np.uint16((values.view(np.uint16) & np.uint16(0x7FFF)).max()).view(np.float16))

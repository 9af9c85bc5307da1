"""GraphBuilder: adds operations to a graph, each checked before libggml sees it.

libggml aborts the process when shapes or types do not fit. Each method here checks the preconditions of the operation
it adds and raises EngineError instead; what it accepts also runs on the CPU. Shapes are innermost first, as in libggml.
Knows nothing of layers or caches; used by common/engine.
"""

from __future__ import annotations

import ctypes as C
import math
from collections.abc import Callable
from typing import Any

from common.errors import EngineError, OutOfMemoryError

from .ffi import PREC_F32, InitParams, lib
from .graph import Graph
from .tensor import F16, F32, I8, I32, I64, Tensor

ROPE_NORMAL, ROPE_NEOX, ROPE_INTERLEAVED_SECTIONS = 0, 2, 40
ROPE_EXTRAPOLATION, ROPE_ATTENTION, ROPE_BETA_FAST, ROPE_BETA_SLOW = 0.0, 1.0, 32.0, 1.0
I16, F64 = 25, 28


def require(condition: bool, operation: str, *tensors: Tensor) -> None:
    """EngineError naming the operation and its operands unless the condition holds."""
    if not condition:
        raise EngineError(f"{operation}: operands do not fit: {', '.join(map(repr, tensors))}")


def is_weight(a: Tensor) -> bool:
    """True for types that matrices and caches have: floats and their quantised forms."""
    return a.type not in (I8, I16, I32, I64, F64)


def is_rows_of_f32(a: Tensor) -> bool:
    """True for f32 whose innermost axis has no gaps."""
    return a.type == F32 and a.nb[0] == 4


class GraphBuilder:
    """Adds checked operations; `finish` hands over the graph."""

    def __init__(self, n_nodes_max: int) -> None:
        # A graph has as many places for operands from outside as for nodes; no operation has more than a few of them.
        n_places = 4 * n_nodes_max + 32
        n_bytes = lib.ggml_tensor_overhead() * (n_nodes_max + 1) + lib.ggml_graph_overhead_custom(
            n_places, False
        )
        self._context = lib.ggml_init(InitParams(n_bytes, None, True))
        if not self._context:
            raise OutOfMemoryError(f"no memory for a graph of {n_nodes_max} nodes")
        self._graph = lib.ggml_new_graph_custom(self._context, n_places, False)
        self._n_nodes_max = self._n_left = n_nodes_max

    def _new(self, operation: Callable[..., int | None], *arguments: Any) -> Tensor:
        """The one place where a node comes into being."""
        if self._n_left < 1:
            raise EngineError(f"the graph was declared for {self._n_nodes_max} nodes and needs more")
        self._n_left -= 1
        return Tensor(operation(self._context, *arguments))

    # --- order and end

    @property
    def n_nodes(self) -> int:
        """Operations that run so far: a place at which the finished graph may be cut."""
        return lib.ggml_graph_n_nodes(self._graph)

    def run(self, tensor: Tensor) -> Tensor:
        """Appends the tensor, and what it needs, to what the graph runs."""
        lib.ggml_build_forward_expand(self._graph, tensor.ptr)
        return tensor

    def output(self, tensor: Tensor) -> Tensor:
        """As `run`, and keeps the result's memory so that it can be read afterwards."""
        lib.ggml_set_output(tensor.ptr)
        return self.run(tensor)

    def input(self, ggml_type: int, *shape: int) -> Tensor:
        """A tensor that is written before each run; some operation must read it, or it gets no memory."""
        self._n_left -= 1
        tensor = Tensor(lib.ggml_new_tensor_4d(self._context, ggml_type, *(*shape, 1, 1, 1)[:4]))
        lib.ggml_set_input(tensor.ptr)
        return tensor

    def finish(self) -> Graph:
        """The graph; the builder is spent."""
        context, self._context = self._context, None
        return Graph(context, self._graph)

    def drop(self) -> None:
        """Frees an unfinished graph. Does nothing after `finish`."""
        if self._context:
            lib.ggml_free(self._context)
        self._context = None

    # --- shapes

    def view(
        self, a: Tensor, shape: tuple[int, ...], strides: tuple[int, ...] = (), offset: int = 0
    ) -> Tensor:
        """A window on `a`: shape of 1 to 4 dimensions, strides in bytes of dimensions 1.., byte offset."""
        ne = (*shape, 1, 1, 1)[:4]
        row = lib.ggml_row_size(a.type, ne[0])
        nb = [*strides]
        while len(nb) < 3:
            nb.append(nb[-1] * ne[len(nb)] if nb else row)
        end = offset + row + sum((n - 1) * b for n, b in zip(ne[1:], nb, strict=True))
        unstrided_end = (
            offset + row * ne[1] * ne[2] * ne[3]
        )  # libggml looks at this before it knows the strides
        if min(ne) < 1 or offset < 0 or max(end, unstrided_end) > a.n_bytes:
            raise EngineError(
                f"view {list(shape)} at {offset} with strides {list(strides)} lies outside {a!r}"
            )
        return self._new(lib.ggml_view_4d, a.ptr, *ne, *nb, offset)

    def reshape(self, a: Tensor, *shape: int) -> Tensor:
        """The same elements in another shape; `a` must be contiguous."""
        require(a.is_contiguous and math.prod(shape) == a.n_elements, f"reshape to {list(shape)}", a)
        return self._new(lib.ggml_reshape_4d, a.ptr, *(*shape, 1, 1, 1)[:4])

    def permute(self, a: Tensor, *axes: int) -> Tensor:
        """Axis i of `a` becomes axis axes[i]."""
        require(sorted(axes) == [0, 1, 2, 3], f"permute {axes}", a)
        return self._new(lib.ggml_permute, a.ptr, *axes)

    def transpose(self, a: Tensor) -> Tensor:
        """Swaps the two innermost axes."""
        return self._new(lib.ggml_transpose, a.ptr)

    def cont_2d(self, a: Tensor, ne0: int, ne1: int) -> Tensor:
        """A contiguous copy in two dimensions."""
        require(ne0 * ne1 == a.n_elements, f"cont_2d {[ne0, ne1]}", a)
        return self._new(lib.ggml_cont_2d, a.ptr, ne0, ne1)

    def concat(self, a: Tensor, b: Tensor, axis: int) -> Tensor:
        """`a` followed by `b` along one axis."""
        same = all(x == y for i, (x, y) in enumerate(zip(a.ne, b.ne, strict=True)) if i != axis)
        require(same and a.type == b.type == F32 and 0 <= axis < 4, f"concat along {axis}", a, b)
        return self._new(lib.ggml_concat, a.ptr, b.ptr, axis)

    def copy(self, a: Tensor, to: Tensor) -> Tensor:
        """Writes `a` over the memory of `to`."""
        require(a.n_elements == to.n_elements and {a.type, to.type} <= {F32, F16}, "copy", a, to)
        return self._new(lib.ggml_cpy, a.ptr, to.ptr)

    # --- arithmetic

    def _repeats(self, b: Tensor, a: Tensor) -> bool:
        return all(x % y == 0 for x, y in zip(a.ne, b.ne, strict=True))

    def add(self, a: Tensor, b: Tensor) -> Tensor:
        """a + b; b repeats to the shape of a."""
        require(self._repeats(b, a) and a.type == b.type == F32, "add", a, b)
        return self._new(lib.ggml_add, a.ptr, b.ptr)

    def mul(self, a: Tensor, b: Tensor) -> Tensor:
        """a * b element by element; b repeats to the shape of a."""
        require(self._repeats(b, a) and a.type == b.type == F32, "mul", a, b)
        return self._new(lib.ggml_mul, a.ptr, b.ptr)

    def scale(self, a: Tensor, factor: float) -> Tensor:
        """factor * a"""
        require(a.type == F32, "scale", a)
        return self._new(lib.ggml_scale, a.ptr, factor)

    def norm(self, a: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm along axis 0, times a weight."""
        return self.mul(self.rms(a, eps), weight)

    def rms(self, a: Tensor, eps: float) -> Tensor:
        """Root-mean-square norm along axis 0."""
        require(is_rows_of_f32(a), "rms_norm", a)
        return self._new(lib.ggml_rms_norm, a.ptr, eps)

    def silu(self, a: Tensor) -> Tensor:
        """x * sigmoid(x)"""
        require(is_rows_of_f32(a), "silu", a)
        return self._new(lib.ggml_silu, a.ptr)

    def sigmoid(self, a: Tensor) -> Tensor:
        """1 / (1 + exp(-x))"""
        require(is_rows_of_f32(a), "sigmoid", a)
        return self._new(lib.ggml_sigmoid, a.ptr)

    def softplus(self, a: Tensor) -> Tensor:
        """log(1 + exp(x))"""
        require(is_rows_of_f32(a), "softplus", a)
        return self._new(lib.ggml_softplus, a.ptr)

    def swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """silu(gate) * up"""
        require(gate.ne == up.ne and gate.type == up.type == F32, "swiglu", gate, up)
        require(gate.is_contiguous and up.is_contiguous, "swiglu needs contiguous operands", gate, up)
        return self._new(lib.ggml_swiglu_split, gate.ptr, up.ptr)

    def geglu(self, gate: Tensor, up: Tensor) -> Tensor:
        """gelu(gate) * up, gelu by its tanh form"""
        require(gate.ne == up.ne and gate.type == up.type == F32, "geglu", gate, up)
        require(gate.is_contiguous and up.is_contiguous, "geglu needs contiguous operands", gate, up)
        return self._new(lib.ggml_geglu_split, gate.ptr, up.ptr)

    # --- matrices and rows

    def matmul(self, weight: Tensor, a: Tensor) -> Tensor:
        """weight [n_in, n_out] times a [n_in, n_rows] -> [n_out, n_rows]."""
        w, x = weight.ne, a.ne
        fits = w[0] == x[0] and x[2] % w[2] == 0 and x[3] % w[3] == 0 and is_weight(weight)
        require(fits and weight.nb[0] <= weight.nb[1] and a.type == F32, "matmul", weight, a)
        return self._new(lib.ggml_mul_mat, weight.ptr, a.ptr)

    def outer_product(self, a: Tensor, b: Tensor) -> Tensor:
        """a [n, n_terms] and b [m, n_terms] (which may be a permutation) -> [n, m], summed over the terms. All f32."""
        require(a.ne[1:] == b.ne[1:] and a.type == b.type == F32 and a.nb[0] == 4, "outer_product", a, b)
        return self._new(lib.ggml_out_prod, a.ptr, b.ptr)

    def soft_max(self, a: Tensor, mask: Tensor | None, scale: float) -> Tensor:
        """Softmax along axis 0 of scale * a + mask. mask f16 [n, n_rows], 0 or -inf, for every [n, n_rows] of `a`."""
        require(a.type == F32 and a.is_contiguous, "soft_max", a)
        if mask is not None:
            fits = mask.type == F16 and mask.is_contiguous and mask.ne == (*a.ne[:2], 1, 1)
            require(fits, "soft_max mask", a, mask)
        return self._new(lib.ggml_soft_max_ext, a.ptr, mask.ptr if mask else None, scale, 0.0)

    def argmax(self, a: Tensor) -> Tensor:
        """i32 [n_rows]: where each row of a [n, n_rows] is largest."""
        require(is_rows_of_f32(a) and a.ne[2:] == (1, 1), "argmax", a)
        return self._new(lib.ggml_argmax, a.ptr)

    def precise(self, product: Tensor) -> Tensor:
        """Asks for f32 accumulation in a matmul, where the device has a coarser one."""
        lib.ggml_prec_set_acc(product.ptr, PREC_F32)
        return product

    def get_rows(self, a: Tensor, ids: Tensor) -> Tensor:
        """Rows of a [n, n_rows] by ids i32 [n_ids]; with further axes, ids [n_ids, n] for each [n, n_rows]."""
        require(
            ids.type == I32 and a.ne[2:] == ids.ne[1:3] and ids.ne[3] == 1 and is_weight(a),
            "get_rows",
            a,
            ids,
        )
        return self._new(lib.ggml_get_rows, a.ptr, ids.ptr)

    def set_rows(self, to: Tensor, rows: Tensor, ids: Tensor) -> Tensor:
        """Writes f32 rows [n, n_ids] over the rows `ids` i64 of `to`. The ids' range is the caller's to check."""
        fits = (
            to.ne[0] == rows.ne[0] and to.ne[2:] == rows.ne[2:] == (1, 1) and ids.ne == (rows.ne[1], 1, 1, 1)
        )
        require(
            fits and rows.type == F32 and ids.type in (I32, I64) and is_weight(to), "set_rows", to, rows, ids
        )
        require(to.nb[0] <= to.nb[1] and rows.nb[0] == 4, "set_rows needs rows side by side", to, rows)
        return self._new(lib.ggml_set_rows, to.ptr, rows.ptr, ids.ptr)

    # --- attention and recurrence

    def rope(
        self,
        a: Tensor,
        positions: Tensor,
        *,
        n_rot: int,
        mode: int,
        n_ctx_train: int,
        freq_base: float,
        freq_scale: float = 1.0,
        factors: Tensor | None = None,
        sections: tuple[int, ...] | None = None,
    ) -> Tensor:
        """Rotary embedding of a [head_dim, n_head, n_tokens]; positions i32 [n_tokens] (times 4 with sections)."""
        n_positions = a.ne[2] * (4 if sections else 1)
        fits = positions.type == I32 and positions.ne == (n_positions, 1, 1, 1) and a.type in (F32, F16)
        require(fits and 0 < n_rot <= a.ne[0] and n_rot % 2 == 0, f"rope of {n_rot} dimensions", a, positions)
        if factors is not None:
            require(factors.type == F32 and factors.ne[0] >= n_rot // 2, "rope factors", a, factors)
        head = (a.ptr, positions.ptr, factors.ptr if factors else None, n_rot)
        tail = (
            n_ctx_train,
            freq_base,
            freq_scale,
            ROPE_EXTRAPOLATION,
            ROPE_ATTENTION,
            ROPE_BETA_FAST,
            ROPE_BETA_SLOW,
        )
        if sections is None:
            return self._new(lib.ggml_rope_ext, *head, mode, *tail)
        require(
            len(sections) == 4 and 0 < sum(sections) <= a.ne[0] and min(sections) >= 0,
            f"rope sections {sections}",
            a,
        )
        return self._new(lib.ggml_rope_multi, *head, (C.c_int * 4)(*sections), mode, *tail)

    def flash_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Attention of q [head_dim, n_tokens, n_head] over k and v [head_dim, n_kv, n_head_kv].

        Returns [head_dim, n_head, n_tokens]. mask f16 [n_kv, n_tokens], 0 or -inf.
        Accumulates in f32 where the device offers it.
        """
        require(k.ne == v.ne and q.ne[0] == k.ne[0] and q.ne[2] % k.ne[2] == 0, "flash_attention", q, k, v)
        require(q.type == F32 and k.type == v.type and is_weight(k), "flash_attention", q, k, v)
        fits = mask.type == F16 and mask.is_contiguous and mask.ne[0] == k.ne[1] and mask.ne[1] >= q.ne[1]
        require(
            fits and q.ne[3] == k.ne[3] == mask.ne[2] == mask.ne[3] == 1, "flash_attention mask", q, k, mask
        )
        out = self._new(lib.ggml_flash_attn_ext, q.ptr, k.ptr, v.ptr, mask.ptr, scale, 0.0, 0.0)
        lib.ggml_prec_set_acc(out.ptr, PREC_F32)
        return out

    def ssm_conv(self, a: Tensor, kernel: Tensor) -> Tensor:
        """Causal convolution of a [d_conv-1+n_tokens, n_channels, n_seq] -> [n_channels, n_tokens, n_seq]."""
        fits = (
            kernel.ne[1] == a.ne[1] and a.ne[0] >= kernel.ne[0] and kernel.ne[2:] == (1, 1) and a.ne[3] == 1
        )
        require(fits and a.type == kernel.type == F32 and a.nb[1] == a.ne[0] * 4, "ssm_conv", a, kernel)
        return self._new(lib.ggml_ssm_conv, a.ptr, kernel.ptr)

    def gated_delta_net(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor
    ) -> Tensor:
        """The gated delta rule over n_tokens, from `state`.

        q, k [S, n_head_k, n_tokens, 1], v [S, n_head_v, n_tokens, 1], g and beta [1, n_head_v, n_tokens, 1],
        state [S, S, n_head_v, 1]. Returns outputs and new state packed one after the other.
        """
        size, n_head, n_tokens, _ = v.ne
        fits = q.ne == k.ne and q.ne[0] == size and q.ne[2:] == v.ne[2:] and n_head % q.ne[1] == 0
        gates = g.ne == beta.ne == (1, n_head, n_tokens, 1) and state.ne == (size, size, n_head, 1)
        require(fits and gates, "gated_delta_net", q, k, v, g, beta, state)
        plain = g.is_contiguous and beta.is_contiguous and state.is_contiguous
        require(
            plain and all(t.type == F32 for t in (q, k, v, g, beta, state)), "gated_delta_net", g, beta, state
        )
        return self._new(lib.ggml_gated_delta_net, q.ptr, k.ptr, v.ptr, g.ptr, beta.ptr, state.ptr, 1)

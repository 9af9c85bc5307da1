"""Step: one graph under construction, with what every layer builder shares.

It knows the inputs' tensors, the caches and which rows are wanted; it does not know any architecture. Made by
graphs.py, handed to the builders in common/engine/arch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from common.ggml.builder import GraphBuilder
from common.ggml.tensor import Tensor
from common.state.sequence import SequenceState
from common.wire.rows import KIND_CONV, KIND_K, KIND_RECURRENT, KIND_V

from .inputs import Inputs
from .weights import Weights

F16_BYTES = 2


@dataclass
class Step:
    """One graph of `n_tokens` rows through the layers [first, last), with `n_out` rows of logits at the end.

    `n_kv` is the number of cache cells attention reads. `reach` and `masks` (by layer kind) collect the tensors whose
    extent is n_kv, so that the finished graph can be aimed at a longer cache instead of being built again.
    """

    builder: GraphBuilder
    weights: Weights
    state: SequenceState
    inputs: Inputs
    first: int
    last: int
    n_tokens: int
    n_out: int
    n_kv: int
    selects_early: bool
    reach: list[Tensor] = field(default_factory=list)
    masks: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.spec = self.state.spec
        self.ends_model = self.last == self.spec.n_layer_full

    # --- which rows

    def is_over(self, layer: int) -> bool:
        """True when nothing after this layer's rows and states is wanted."""
        return self.ends_model and self.n_out == 0 and layer == self.last - 1

    def selects_after_attention(self, layer: int) -> bool:
        """True when the rows wanted are picked out inside this layer."""
        return self.selects_early and self.ends_model and layer == self.last - 1

    def select(self, x: Tensor) -> Tensor:
        """The rows whose logits are wanted; `x` itself when that is all of them."""
        if self.n_out == self.n_tokens:
            return x
        return self.builder.get_rows(x, self.inputs.out_ids_view(self.builder, self.n_out))

    # --- weights, positions

    def layer_weights(self, layer: int) -> Callable[[str], Tensor]:
        """Looks up the layer's weights by their part name."""
        return lambda part: self.weights[self.spec.tensor_name(layer, part)]

    def rope(self, layer: int, x: Tensor, mode: int) -> Tensor:
        """Rotates x [head_dim, n_head, n_tokens] by its positions."""
        spec = self.spec.rope_of(layer)
        return self.builder.rope(
            x,
            self.inputs.positions_view(self.builder, self.n_tokens),
            n_rot=spec.n_rot,
            mode=mode,
            n_ctx_train=self.spec.n_ctx_train,
            freq_base=spec.freq_base,
            freq_scale=spec.freq_scale,
            factors=self.weights.get("rope_freqs.weight"),
            sections=spec.sections or None,
        )

    # --- caches

    def keep_rows(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        """Writes k and v [head_dim, n_head_kv, n_tokens] to the layer's cells of this ubatch.

        Queries are put in order first: stock runs q, v, k and then the two writes.
        """
        g, n, row = self.builder, self.n_tokens, self.spec.n_embd_kv
        for t in (q, v, k):
            g.run(t)
        tensors = self.state.layers[layer].tensors
        cells = self.inputs.cells_view(g, n)
        g.run(g.set_rows(tensors[KIND_K], g.view(k, (row, n), (k.nb[2],)), cells))
        g.run(g.set_rows(tensors[KIND_V], g.view(v, (row, n), (v.nb[2],)), cells))

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Flash attention of q over the layer's cells [0, n_kv) -> [head_dim * n_head, n_tokens]."""
        g = self.builder
        k, v = (self._window(rows) for rows in self._rows(layer))
        out = g.flash_attention(g.permute(q, 0, 2, 1, 3), k, v, self._mask(layer), scale)
        return g.reshape(out, self.spec.head_dim * self.spec.n_head, self.n_tokens)

    def _rows(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's keys and values, row after row."""
        tensors = self.state.layers[layer].tensors
        return tensors[KIND_K], tensors[KIND_V]

    def _window(self, cache: Tensor) -> Tensor:
        """[head_dim, n_kv, n_head_kv] view of a cache whose rows have the heads side by side."""
        d, row = self.spec.head_dim, cache.nb[1]
        view = self.builder.view(cache, (d, self.n_kv, self.spec.n_head_kv), (row, d * F16_BYTES))
        self.reach.append(view)
        return view

    def _mask(self, layer: int) -> Tensor:
        """f16 [n_kv, n_tokens], the same tensor for every layer of a kind."""
        kind = self.spec.kind(layer)
        if kind not in self.masks:
            self.masks[kind] = self.inputs.mask_view(self.builder, kind, self.n_kv, self.n_tokens)
        return self.masks[kind]

    def aim(self, n_kv: int) -> None:
        """Lets attention of the finished graph read the cells [0, n_kv)."""
        for view in self.reach:
            view.struct.ne[1] = n_kv
        for mask in self.masks.values():
            struct = mask.struct
            struct.ne[0] = n_kv
            struct.nb[1] = n_kv * struct.nb[0]
            struct.nb[2] = struct.nb[3] = struct.nb[1] * struct.ne[1]

    def recurrent_state(self, layer: int) -> tuple[Tensor, Tensor]:
        """The layer's convolution tail [d_conv-1, n_channels] and state [d_state, d_state, n_head_v]."""
        tensors = self.state.layers[layer].tensors
        return tensors[KIND_CONV], tensors[KIND_RECURRENT]

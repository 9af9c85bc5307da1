"""KV caches as states: which there are, how a function writes them, and what its tokens may see.

Two layouts. A context within the window needs one cache, `kv_cache_0` [2 n_layer, n_head_kv, context, head_dim]. A
longer one has `kv_cache_global` for global layers and `kv_cache_local` [2 n_local, n_head_kv, window, head_dim], a
ring: position p lies in slot p mod window. K and V of a layer are neighbours. All chunks declare the states of the
whole model and touch their own layers' rows, because apps make one state and hand it to every chunk.

A ring makes every function right at every position, makes writing a position twice harmless, and needs no arithmetic
with positions:

    infer     the token is in its slot before it is read; then slot s holds something visible iff s <= p, or the ring is
              full: which is what the first `window` columns of the causal mask say
    prefill   the batch sees the ring as it was, followed by itself. An old key is still wanted by the batch's token i
              iff its slot is overwritten by none of the tokens 0..i: those slots are the update mask's columns, folded
              to the window and summed up to i, one product with a constant triangle

Called by layers.py and programs.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from common.errors import SettingError
from device.coreml import toolchain
from device.coreml.convert.description import GemmaModel

F16 = np.float16
HIDDEN = F16(-30000.0)
"""Added to a score that must not count: exp of it is 0, and no sum of a mask and a score passes fp16."""
STATE_MULTIPLE = 32
UNIFIED, GLOBAL, LOCAL = "kv_cache_0", "kv_cache_global", "kv_cache_local"


@dataclass(frozen=True)
class CacheLayout:
    """Where each layer's K and V lie, for a model and a context."""

    model: GemmaModel
    context: int

    def __post_init__(self) -> None:
        for what, n in (("context", self.context), ("head_dim", self.model.head_dim)):
            if n % STATE_MULTIPLE or n < 1:
                raise SettingError(
                    f"{what} {n}: the dimensions of a state are multiples of {STATE_MULTIPLE} on the Neural Engine"
                )
        if self.rotates and (self.context % self.model.window or self.model.window % STATE_MULTIPLE):
            n = self.context // self.model.window
            raise SettingError(
                f"--context {self.context} exceeds the model's window of {self.model.window} and must be a multiple "
                f"of it: use {n * self.model.window} or {(n + 1) * self.model.window}"
            )

    @property
    def rotates(self) -> bool:
        """Whether sliding layers forget: the context is longer than the window."""
        return self.context > self.model.window and "sliding" in self.model.kinds

    def states(self) -> dict[str, tuple[int, int, int, int]]:
        """Shapes by name."""
        model = self.model
        tail = (model.n_head_kv, self.context, model.head_dim)
        if not self.rotates:
            return {UNIFIED: (2 * model.n_layer, *tail)}
        n_local = model.kinds.count("sliding")
        shapes = {LOCAL: (2 * n_local, model.n_head_kv, model.window, model.head_dim)}
        if n_local < model.n_layer:
            shapes = {GLOBAL: (2 * (model.n_layer - n_local), *tail), **shapes}
        return shapes

    def place(self, layer: int) -> tuple[str, int]:
        """State of a layer and the first of its two rows there."""
        if not self.rotates:
            return UNIFIED, 2 * layer
        kind = self.model.kinds[layer]
        return (LOCAL if kind == "sliding" else GLOBAL), 2 * self.model.kinds[:layer].count(kind)


@dataclass
class Caches:
    """The caches inside a function that is being built. `update_mask` is None where one token is written."""

    layout: CacheLayout
    states: dict[str, Any]
    causal_mask: Any  # fp16 [1, 1, n_tokens, context]
    current_pos: Any  # int32 [1]
    update_mask: Any  # None, or fp16 [1, 1, context, n_tokens]
    _shared: dict[str, Any] = field(default_factory=dict)

    def written(self, layer: int, new: Any) -> tuple[Any, Any, Any]:
        """Writes K and V, `new` [2, n_head_kv, n_tokens, head_dim]; what to attend to: keys, values, mask to add.

        Keys and values are [1, n_head_kv, n_keys, head_dim], the mask [1, 1, n_tokens, n_keys].
        """
        name, row = self.layout.place(layer)
        mb, (_, n_kv, length, dim) = toolchain.builder(), self.states[name].shape
        whole = mb.read_state(input=self.states[name])
        bounds = {"begin": [row, 0, 0, 0], "end": [row + 2, n_kv, length, dim]}
        if self.update_mask is None:
            seen = self._write_token(name, whole, row, new)
        else:
            old = mb.slice_by_index(x=whole, **bounds)
            placed = mb.matmul(x=self._slots(name), y=new)
            kept = mb.mul(x=old, y=self._kept(name))
            both = mb.add(x=kept, y=placed)
            mb.coreml_update_state(
                state=self.states[name], value=mb.slice_update(x=whole, update=both, **bounds)
            )
            seen = mb.concat(values=[old, new], axis=2) if name == LOCAL else both
        n_keys = seen.shape[2]
        keys, values = (
            mb.slice_by_index(x=seen, begin=[i, 0, 0, 0], end=[i + 1, n_kv, n_keys, dim]) for i in (0, 1)
        )
        return keys, values, self._mask(name)

    def _write_token(self, name: str, whole: Any, row: int, new: Any) -> Any:
        mb, (_, n_kv, length, dim) = toolchain.builder(), self.states[name].shape
        slot = self.current_pos
        if name == LOCAL:
            slot = self._once("slot", lambda: mb.mod(x=self.current_pos, y=np.int32(length)))
        begin = mb.concat(values=[[row, 0], slot, [0]], axis=0)
        end = mb.concat(values=[[row + 2, n_kv], mb.add(x=slot, y=np.int32(1)), [dim]], axis=0)
        value = mb.slice_update(x=whole, update=new, begin=begin, end=end)
        full = mb.coreml_update_state(state=self.states[name], value=value)
        return mb.slice_by_index(x=full, begin=[row, 0, 0, 0], end=[row + 2, n_kv, length, dim])

    def _slots(self, name: str) -> Any:
        """fp16 [1, 1, slots, n_tokens]: 1 where a token goes. The ring's is the context's, folded."""
        if name != LOCAL:
            return self.update_mask
        return self._once("slots_local", self._folded)

    def _folded(self) -> Any:
        mb, window = toolchain.builder(), self.layout.model.window
        n_tokens = self.update_mask.shape[3]
        turns = mb.reshape(x=self.update_mask, shape=[1, self.layout.context // window, window, n_tokens])
        return mb.reduce_sum(x=turns, axes=[1], keep_dims=True)

    def _kept(self, name: str) -> Any:
        """fp16 [1, 1, slots, 1]: 0 where a slot is written."""
        mb = toolchain.builder()

        def kept() -> Any:
            return mb.sub(x=F16(1), y=mb.reduce_sum(x=self._slots(name), axes=[-1], keep_dims=True))

        return self._once(f"kept_{name}", kept)

    def _mask(self, name: str) -> Any:
        if name != LOCAL:
            return self.causal_mask
        return self._once("mask_local", self._ring_mask)

    def _ring_mask(self) -> Any:
        mb, window = toolchain.builder(), self.layout.model.window
        n_tokens = self.causal_mask.shape[2]
        ring = mb.slice_by_index(x=self.causal_mask, begin=[0, 0, 0, 0], end=[1, 1, n_tokens, window])
        if self.update_mask is None:
            return ring
        up_to = np.triu(np.ones((n_tokens, n_tokens), F16))[None, None]  # [from token, up to token]
        overwritten = mb.transpose(x=mb.matmul(x=self._slots(LOCAL), y=up_to), perm=[0, 1, 3, 2])
        itself = np.where(np.tri(n_tokens, dtype=bool), F16(0), HIDDEN)[None, None]
        old = mb.add(x=ring, y=mb.mul(x=overwritten, y=HIDDEN))
        return mb.concat(values=[old, itself], axis=-1)

    def _once(self, key: str, make: Any) -> Any:
        """Values that all layers of a function share."""
        if key not in self._shared:
            self._shared[key] = make()
        return self._shared[key]

"""The MIL programs of a bundle: embeddings, transformer chunks of several functions, output head.

Names of features and functions are those that ANEMLL's runtime uses (0.3.5), so that an app which runs its bundles can
run ours: input_ids; hidden_states, position_ids, causal_mask, current_pos, update_mask -> output_hidden_states; and
logits1, logits2, ... of the head. The final norm is the end of the last chunk. Called by convert.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from device.coreml import toolchain
from device.coreml.convert.caches import CacheLayout, Caches
from device.coreml.convert.layers import LayerBuilder
from device.coreml.convert.stored import WeightStore, fp16

F16 = np.float16
HEAD_CHANNELS_MAX = 16_384
"""Output channels of one convolution of the head; apps add this to the index of a later part's tokens."""
OUTPUT = "output_hidden_states"


@dataclass(frozen=True)
class ChunkPlan:
    """One chunk: layers [first, last) of the model, and whether the final norm follows them."""

    index: int
    n_chunks: int
    first: int
    last: int

    @property
    def is_last(self) -> bool:
        return self.index + 1 == self.n_chunks


def embeddings_program(store: WeightStore, scale: float) -> Any:
    """Token ids int32 [1, n] -> residual [1, n, n_embd]; `embeddings_inputs` says which n."""
    mb, ct, model = toolchain.builder(), toolchain.coremltools(), store.model
    n_tokens = toolchain.new_symbol()

    @mb.program(
        input_specs=[mb.TensorSpec((1, n_tokens), toolchain.mil_types().int32)],
        opset_version=ct.target.iOS18,
    )
    def program(input_ids: Any) -> Any:
        rows = mb.gather(x=store.matrix("embed"), indices=input_ids, axis=0)
        factor = fp16(np.array(model.embedding_scale * scale), "the embedding's scale")[()]
        return mb.mul(x=rows, y=factor, name="hidden_states")

    return program


def embeddings_inputs(batch: int) -> list[Any]:
    """The shapes the embeddings take: one token, and a batch."""
    ct = toolchain.coremltools()
    shapes = ct.EnumeratedShapes(shapes=[(1, 1), (1, batch)] if batch > 1 else [(1, 1)])
    return [ct.TensorType(name="input_ids", shape=shapes, dtype=np.int32)]


def head_pieces(n_vocab: int) -> list[tuple[int, int]]:
    """Token ids [first, last) of each of the head's convolutions."""
    return [(at, min(at + HEAD_CHANNELS_MAX, n_vocab)) for at in range(0, n_vocab, HEAD_CHANNELS_MAX)]


def head_program(store: WeightStore) -> Any:
    """Normed residual [1, 1, n_embd] -> logits1.. [1, 1, up to 16,384]."""
    mb, ct, model = toolchain.builder(), toolchain.coremltools(), store.model

    @mb.program(
        input_specs=[mb.TensorSpec((1, 1, model.n_embd), toolchain.mil_types().fp16)],
        opset_version=ct.target.iOS18,
    )
    def program(hidden_states: Any) -> tuple[Any, ...]:
        x = mb.expand_dims(x=mb.transpose(x=hidden_states, perm=[0, 2, 1]), axes=[2])
        logits = []
        for i, (first, last) in enumerate(head_pieces(model.n_vocab)):
            piece = mb.conv(x=x, weight=store.matrix("head", first, last, trailing=2))
            piece = mb.transpose(x=mb.squeeze(x=piece, axes=[2]), perm=[0, 2, 1], name=f"logits{i + 1}")
            logits.append(piece)
        return tuple(logits)

    return program


def chunk_program(store: WeightStore, layout: CacheLayout, plan: ChunkPlan, batch: int, scale: float) -> Any:
    """A chunk's functions over the same weights: infer and prefill, and the same two under their `_rotate` names.

    The ring (caches.py) is right at every position, so that a call under either name is; apps choose the `_rotate`
    names from position `window` on, and a bundle without them would not be called at all there.
    """
    functions = {}
    for name in function_names(layout.rotates):
        n_tokens = batch if name.startswith("prefill") else 1
        functions[name] = _function(store, layout, plan, n_tokens, name.startswith("prefill"), scale)
    return toolchain.make_multifunction(functions, "infer")


def function_names(rotates: bool) -> tuple[str, ...]:
    names = ("infer", "prefill")
    return (*names, *(f"{name}_rotate" for name in names)) if rotates else names


def _function(
    store: WeightStore, layout: CacheLayout, plan: ChunkPlan, n_tokens: int, masked: bool, scale: float
) -> Any:
    mb, types = toolchain.builder(), toolchain.mil_types()
    model, states = store.model, layout.states()
    specs = {
        "hidden_states": mb.TensorSpec((1, n_tokens, model.n_embd), types.fp16),
        "position_ids": mb.TensorSpec((n_tokens,), types.int32),
        "causal_mask": mb.TensorSpec((1, 1, n_tokens, layout.context), types.fp16),
        "current_pos": mb.TensorSpec((1,), types.int32),
    }
    if masked:
        specs["update_mask"] = mb.TensorSpec((1, 1, layout.context, n_tokens), types.fp16)
    specs |= {name: mb.StateTensorSpec(shape, types.fp16) for name, shape in states.items()}

    def body(given: Mapping[str, Any]) -> list[Any]:
        kinds = {model.kinds[layer] for layer in range(plan.first, plan.last)}
        rotations = {kind: _rotation(store, layout, kind, given["position_ids"]) for kind in sorted(kinds)}
        caches = Caches(
            layout, {name: given[name] for name in states}, given["causal_mask"], given["current_pos"],
            given.get("update_mask"),
        )  # fmt: skip
        builder = LayerBuilder(model, store, n_tokens, scale, caches, rotations)
        used = {layout.place(layer)[0] for layer in range(plan.first, plan.last)}
        for name in sorted(
            set(states) - used
        ):  # declared because chunks share one state; never an unused input
            mb.read_state(input=given[name])
        x = given["hidden_states"]
        for layer in range(plan.first, plan.last):
            x = builder.add(layer, x)
        if plan.is_last:
            x = builder.norm(x, "norm")
        return [mb.identity(x=x, name=OUTPUT)]

    return toolchain.make_function(specs, body)


def _rotation(store: WeightStore, layout: CacheLayout, kind: Any, positions: Any) -> tuple[Any, Any]:
    mb, model = toolchain.builder(), store.model
    table = model.ropes[kind].table(layout.context, model.head_dim)
    shape = [1, 1, positions.shape[0], model.head_dim // 2]
    cos, sin = (
        mb.reshape(
            x=mb.gather(x=store.vector(f"rope_{kind}_{name}", values), indices=positions, axis=0), shape=shape
        )
        for name, values in zip(table._fields, table, strict=True)
    )
    return cos, sin

"""One module per architecture, each a builder of one layer: `build_layer(step, layer, x) -> residual or None`.

A builder states the mathematics of a layer in operations of common/ggml/graph.py and nothing else; caches, inputs,
masks and the choice of rows belong to step.py. Picked by architecture name in `builder`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from . import gemma3, llama, qwen35

if TYPE_CHECKING:
    from common.engine.step import Step
    from common.ggml.tensor import Tensor

LayerBuilder = Callable[["Step", int, "Tensor"], "Tensor | None"]
_BUILDERS: dict[str, LayerBuilder] = {
    "llama": llama.build_layer,
    "qwen35": qwen35.build_layer,
    "gemma3": gemma3.build_layer,
}
SELECTS_EARLY = {"llama": True, "qwen35": False, "gemma3": True}
"""Where stock picks the rows it wants logits of: after the last layer's attention, or after the output norm."""


def builder(arch: str) -> LayerBuilder:
    """The layer builder of an architecture that ModelSpec accepts."""
    return _BUILDERS[arch]

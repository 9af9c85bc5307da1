"""Operations of the interpreter by kind; importing this package fills the table in `registry`."""

from device.coreml.reference.ops import (
    contraction,
    elementwise,
    indexing,
    normalization,
    palette,
    reduction,
    shaping,
)
from device.coreml.reference.ops.registry import OPERATIONS

__all__ = [
    "OPERATIONS", "contraction", "elementwise", "indexing", "normalization", "palette", "reduction", "shaping",
]  # fmt: skip

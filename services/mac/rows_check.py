"""Are these exactly the rows a tail owes for a range of tokens, and is every number in them finite?

A tail that answers with a layer missing, a range off by one or a NaN has failed, whatever else it says; better a read
done again on the host than a conversation poisoned. Knows the shape of the tail only. Used by services.mac.remote_span.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from common.errors import LinkError
from common.wire.rows import KIND_CONV, KIND_K, KIND_RECURRENT, KIND_V, RowSection

GGML_F32, GGML_F16 = 0, 1
EXPONENT_MASK = {GGML_F32: (np.uint32, 0x7F80_0000), GGML_F16: (np.uint16, 0x7C00)}
"""A float is infinite or NaN exactly when all bits of its exponent are set."""


class TailRows:
    """The sections a tail over layers [first, last) owes for each chunk."""

    def __init__(self, spec: Any, first: int, last: int) -> None:
        """spec: ModelSpec; only `kind(layer)` is asked."""
        self.first, self.last = first, last
        self._recurrent = [layer for layer in range(first, last) if spec.kind(layer) == "recurrent"]
        self._attention = [layer for layer in range(first, last) if spec.kind(layer) != "recurrent"]

    @property
    def has_recurrent(self) -> bool:
        return bool(self._recurrent)

    def expected(self, p0: int, p1: int, *, with_state: bool) -> set[tuple[int, int, int, int]]:
        """(layer, kind, p0, p1) of every section for tokens [p0, p1)."""
        owed = {(layer, kind, p0, p1) for layer in self._attention for kind in (KIND_K, KIND_V)}
        if with_state:
            owed |= {
                (layer, kind, p1, p1) for layer in self._recurrent for kind in (KIND_CONV, KIND_RECURRENT)
            }
        return owed

    def check(self, sections: Sequence[RowSection], p0: int, p1: int, *, with_state: bool) -> None:
        """Raise LinkError unless `sections` are exactly those expected, each once, with finite numbers only."""
        self._check(sections, self.expected(p0, p1, with_state=with_state), p0, p1)

    def check_state(self, sections: Sequence[RowSection], position: int) -> None:
        """As `check`, for the recurrent states at `position` alone."""
        owed = self.expected(position, position, with_state=True) - self.expected(
            position, position, with_state=False
        )
        self._check(sections, owed, position, position)

    def _check(
        self, sections: Sequence[RowSection], owed: set[tuple[int, int, int, int]], p0: int, p1: int
    ) -> None:
        found = [(section.layer, section.kind, section.p0, section.p1) for section in sections]
        if len(found) != len(owed) or set(found) != owed:
            missing, extra = sorted(owed - set(found)), sorted(set(found) - owed)
            raise LinkError(
                f"the worker's rows for [{p0}, {p1}) are not those asked for: {len(found)} sections of "
                f"{len(owed)}; missing {missing[:3]}, unasked {extra[:3]} (layer, kind, from, to)",
                cause="range",
            )
        for section in sections:
            if not is_finite(section):
                raise LinkError(
                    f"layer {section.layer}: the worker's rows for [{p0}, {p1}) hold numbers that are not finite",
                    cause="nonfinite",
                )


def is_finite(section: RowSection) -> bool:
    """Whether every number is finite. Types other than f32 and f16 are not looked into."""
    if section.ggml_type not in EXPONENT_MASK:
        return True
    unsigned, mask = EXPONENT_MASK[section.ggml_type]
    words = np.frombuffer(section.data, dtype=unsigned)
    return not bool(((words & mask) == mask).any())

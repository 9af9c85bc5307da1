"""Shapes and types of partials. That their fold is attention over all keys is the merge law (tests/laws)."""

from __future__ import annotations

import numpy as np
import pytest

from common.attention.partial import PartialAttention, fold, fold_all
from common.errors import EngineError


def test_a_fold_keeps_shape_and_type() -> None:
    for dtype in (np.float32, np.float64):
        part = PartialAttention.identity((2, 3), 4, dtype)
        folded = fold(part, part)
        assert (folded.m.shape, folded.l.shape, folded.o.shape) == ((2, 3), (2, 3), (2, 3, 4))
        assert {folded.m.dtype, folded.l.dtype, folded.o.dtype} == {np.dtype(dtype)}
        o, lse = folded.normalised()
        assert (o.dtype, lse.dtype) == (dtype, dtype)


def test_shapes_that_do_not_fit_are_refused() -> None:
    part = PartialAttention.identity((2, 3), 4)
    with pytest.raises(EngineError, match=r"cannot fold partials of float32 \(2, 3, 4\) and float64"):
        fold(part, PartialAttention.identity((2, 3), 4, np.float64))
    with pytest.raises(EngineError, match="m and l of one shape"):
        PartialAttention(part.m, part.l[:1], part.o)
    with pytest.raises(EngineError, match="all of one float type"):
        PartialAttention(part.m, part.l.astype(np.float64), part.o)
    with pytest.raises(EngineError, match="no partial to fold"):
        fold_all([])

"""Closeness counts what it says; the fused engine always agrees with stock, the paged one but for close calls.

Counting is tried on made-up logits. Then the embedded model, teacher-forced on natural text: what the paged engine
chooses differently must be as close a call as a rounding decides.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from common.engine.closeness import Closeness, teacher_forced
from common.engine.engine import Decoding, Engine
from common.ggml.stock import StockContext, StockModel
from common.ggml.vocabulary import Vocabulary

N_READ, N_DECODED, N_CTX = 192, 40, 256
CLOSE_CALL = 1.0
"""Stock's two kinds of attention differ at gaps of up to about half of this, on a model whose logits spread by 3."""
TEXT = (
    "The harbour was built in three stages. The first breakwater, finished before the war, kept out the swell from "
    "the west but let the winter storms in from the south. When the second was added, the fishing fleet doubled, and "
    "with it came a market, a railway siding and a school. Engineers measured the currents for two years before they "
    "proposed the third, which would close the gap almost entirely and leave a channel wide enough for one ship. "
)


def test_counting() -> None:
    count = Closeness()
    logits = np.array([1.0, 3.0, 2.5, 0.0], np.float32)
    count.add(7, logits, logits, np.array([1.0, 2.0, 2.5, 0.0], np.float32))
    count.add(8, np.array([4.0, 3.0, 2.5, 0.0], np.float32), logits, logits)
    assert (count.compared, count.same_as_stock, count.stock_same) == (2, 1, 1)
    assert (count.top1_vs_stock, count.stock_flash_vs_nonflash) == (0.5, 0.5)
    (difference,) = count.differences
    assert (difference.position, difference.ours, difference.stock, difference.gap) == (8, 0, 1, 2.0)
    assert count.stock_gap_max == 0.5


@pytest.mark.model
def test_decode_by_pages_differs_from_stock_by_rounding_only(smollm2: Path) -> None:
    vocabulary = Vocabulary.load(smollm2)
    tokens = np.array(vocabulary.tokenize(TEXT * 4, add_special=False, parse_special=False), np.int32)
    vocabulary.close()
    model = StockModel(smollm2, repack=True)
    flash, plain = (StockContext(model, n_ctx=N_CTX, flash_attention=on) for on in (True, False))
    counts = {}
    for decoding in (Decoding("fused"), Decoding("paged", 64, 2)):
        with Engine.load(smollm2, n_ctx=N_CTX, device="cpu", decoding=decoding) as engine:
            counts[decoding.path] = teacher_forced(engine, flash, plain, tokens[: N_READ + N_DECODED], N_READ)
    flash.close(), plain.close(), model.close()
    assert counts["fused"].compared == counts["fused"].same_as_stock == N_DECODED
    paged = counts["paged"]
    assert paged.compared == N_DECODED and paged.stock_same == counts["fused"].stock_same
    assert paged.top1_vs_stock > 0.8
    assert all(difference.gap < CLOSE_CALL for difference in paged.differences)

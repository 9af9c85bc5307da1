"""Stored rows out of whole pages: what programs are made from, where pages are kept as they travel and not by row.

Called by whoever keeps such pages, to give `open_frozen` its rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from common.state.pages import LINE_PAD
from device.coreml.frozen.builder import Rows
from device.coreml.page_rows import GGML_F16


def rows_of_images(images: Sequence[tuple[np.ndarray, np.ndarray]], n_head_kv: int, head_dim: int) -> Rows:
    """Stored rows out of whole pages as they lie in memory and travel (common/state/pages.py), one after the other.

    images: (keys, values) of each page, of any dtype of whole f16: keys [n_head_kv, page_tokens, head_dim], then lines
    of values [n_head_kv * head_dim, page_tokens + LINE_PAD].
    """
    k_rows, v_rows = [], []
    for keys, values in images:
        heads = keys.reshape(-1).view(np.float16).reshape(n_head_kv, -1, head_dim)
        n = heads.shape[1]
        lines = values.reshape(-1).view(np.float16).reshape(n_head_kv * head_dim, n + LINE_PAD)
        k_rows.append(heads.transpose(1, 0, 2).reshape(n, -1))
        v_rows.append(lines[:, :n].T)
    k, v = (np.ascontiguousarray(np.concatenate(rows)).view(np.uint8) for rows in (k_rows, v_rows))
    return k, v, GGML_F16

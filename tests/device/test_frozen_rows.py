"""Aim: rows taken out of pages are those that were put in. Method: the arithmetic by which the engine fills pages."""

import numpy as np

from common.state.pages import PageLayout
from device.frozen_rows import rows_of_images


def test_rows_of_pages_are_those_that_were_kept():
    layout, rng = PageLayout(64, 192, n_head=2, head_dim=8), np.random.default_rng(3)
    k, v = rng.standard_normal((2, 192, 16)).astype(np.float16)
    keys, values = np.zeros(192 * 16, np.float16), np.zeros(layout.n_value_elements, np.float16)
    keys.reshape(-1, 8)[layout.key_ids(0, 192)] = k.reshape(192, 2, 8)
    values[layout.value_ids(0, 192)] = v
    images = [
        (
            keys[layout.key_offset(page) :][: 64 * 16],
            values[layout.value_offset(page) :][: layout.line(page) * 16].view(np.uint8),
        )
        for page in (1, 2)
    ]
    k_rows, v_rows, ggml_type = rows_of_images(images, 2, 8)
    assert ggml_type == 1
    assert np.array_equal(k_rows.view(np.float16), k[64:]) and np.array_equal(v_rows.view(np.float16), v[64:])

"""Aim: rotary tables are right, and no scaling is ever ignored. Method: against an independent float64 computation."""

import numpy as np
import pytest

from common.errors import ModelError
from device.coreml.convert.rope import Rope, scaled

DIM = 256


@pytest.mark.parametrize(("base", "factor"), [(1e4, 1.0), (1e6, 8.0), (1e6, 1.0)])
def test_tables_equal_a_float64_reference(base, factor):
    table = Rope(base, factor).table(4096, DIM)
    positions = np.arange(4096, dtype=np.longdouble)
    for pair in (0, 1, 17, DIM // 2 - 1):
        angle = (positions / factor * np.longdouble(base) ** (-2 * np.longdouble(pair) / DIM)).astype(
            np.float64
        )
        assert np.array_equal(table.cos[:, pair], np.cos(angle).astype(np.float16))
        assert np.array_equal(table.sin[:, pair], np.sin(angle).astype(np.float16))


def test_an_ignored_factor_would_be_wrong_by_everything():
    right, wrong = Rope(1e6, 8.0).table(1024, DIM), Rope(1e6).table(1024, DIM)
    assert np.abs(right.cos.astype(float) - wrong.cos).max() > 1.9


def test_scaling_is_read():
    assert scaled(1e6, {"rope_type": "linear", "factor": 8.0}, "x") == Rope(1e6, 8.0)
    assert scaled(1e6, {"type": "linear", "factor": 4}, "x") == Rope(1e6, 4.0)
    assert scaled(1e6, {"rope_type": "default", "rope_theta": 5e5}, "x") == Rope(5e5)
    assert scaled(1e4, None, "x") == Rope(1e4)


@pytest.mark.parametrize("kind", ["llama3", "yarn", "dynamic", "longrope", "proportional"])
def test_every_other_type_is_refused_by_name(kind):
    with pytest.raises(ModelError, match=kind):
        scaled(1e6, {"rope_type": kind, "factor": 8.0}, "config.json")


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear"},
        {"rope_type": "linear", "factor": 0},
        {"rope_type": "linear", "factor": 8, "low_freq_factor": 1},
    ],
)
def test_incomplete_or_unknown_keys_are_refused(scaling):
    with pytest.raises(ModelError, match=r"config\.json"):
        scaled(1e6, scaling, "config.json")

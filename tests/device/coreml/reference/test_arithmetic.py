"""Aim: each accumulator rounds where it says it does, and flushing removes subnormals as operands, sums and results.

Method: hand-made sums whose value differs by accumulator, and random products against a scalar loop that rounds in the
same places.
"""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import SettingError
from device.coreml.reference import Arithmetic

F16, F32 = np.float16, np.float32


def scalar_dot(a, b, block):
    """fp16 from block to block; block 0 means every product goes straight into the fp16 register."""
    total = None
    for start in range(0, len(a), block or 1):
        products = a[start : start + (block or 1)].astype(F32) * b[start : start + (block or 1)].astype(F32)
        part = sum(products, F32(0))
        if total is None:
            total = F16(part)
        else:
            total = F16(F32(total) + (F32(F16(part)) if block else part))
    return total


@given(st.integers(1, 40), st.sampled_from([0, 1, 3, 8, 64]), st.integers(0, 10_000))
def test_accumulators_equal_a_scalar_loop(k, block, seed):
    rng = np.random.default_rng(seed)
    # Small integers and their halves: fp32 sums of them are exact, so the loop's order does not matter inside a block.
    a = (rng.integers(-200, 200, k) / 2).astype(F16)
    b = (rng.integers(-200, 200, k) / 2).astype(F16)
    arith = Arithmetic(f"block{block}" if block else "in-order")
    found = arith.matmul(a[None, :], b[:, None])[0, 0]
    assert found.dtype == F16
    assert found == scalar_dot(a, b, block)


def test_a_long_sum_tells_the_accumulators_apart():
    ones = np.ones(5000, F16)
    totals = {
        name: float(Arithmetic(name).sum(ones, (0,), keep_dims=False))
        for name in ("fp32", "block64", "in-order")
    }
    # An fp16 register stops at 2048, where adding 1 rounds away; blocks of 64 lose only the last block of 8.
    assert totals == {"fp32": 5000.0, "block64": 5000.0, "in-order": 2048.0}


def test_flushing_removes_subnormals():
    small = np.array([2.0**-15, 2.0**-14, -(2.0**-24)], F16)
    flushed = Arithmetic(subnormals="flushed")
    np.testing.assert_array_equal(flushed.flush(small), np.array([0, 2.0**-14, 0], F16))
    np.testing.assert_array_equal(Arithmetic().flush(small), small)
    halves = np.full((1, 2), 2.0**-8, F16)
    assert flushed.matmul(halves, np.full((2, 1), 2.0**-8, F16))[0, 0] == 2.0**-15 * 0
    assert Arithmetic().matmul(halves, np.full((2, 1), 2.0**-8, F16))[0, 0] == 2.0**-15


def test_partial_sums_are_flushed_too():
    a = np.array([[2.0**-15, 2.0**-15]], F32).astype(F16)
    b = np.ones((2, 1), F16)
    assert Arithmetic("block1", "flushed").matmul(a, b)[0, 0] == 0
    assert Arithmetic("block2", "flushed").matmul(a, b)[0, 0] == 2.0**-14


def test_integers_are_summed_exactly_and_fp32_is_left_alone():
    arith = Arithmetic("in-order")
    assert arith.sum(np.full(5000, 3, np.int32), (0,), keep_dims=False) == 15000
    assert arith.matmul(np.ones((1, 5000), F32), np.ones((5000, 1), F32))[0, 0] == 5000


@pytest.mark.parametrize("name", ["fp16", "block", "block0", "blockx", "block70000"])
def test_unknown_accumulators_are_refused(name):
    with pytest.raises(SettingError, match="use fp32, in-order, or blockN"):
        Arithmetic(name)
    with pytest.raises(SettingError, match="use kept or flushed"):
        Arithmetic("fp32", name)

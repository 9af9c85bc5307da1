"""Aim: the product's page (16,384 keys, 4 KV heads, head_dim 256, 48 rows) holds what small pages promise.

Method: the whole thing once: template, rows in both formats, write, whole build, every case of scores under every
arithmetic. Minutes, so it runs in `make verify` (marker coreml); `outrigger pages accuracy` prints the same errors.
"""

import numpy as np
import pytest

from device.coreml import blob
from device.coreml.accuracy import ARITHMETICS, BOUNDS, CASES, Inputs, attend_float64, make_inputs, measure
from device.coreml.geometry import PAGE_TOKENS, PageGeometry
from device.coreml.page_check import check_page
from device.coreml.page_rows import GGML_Q8_0, Q8_0, PageConstants
from device.coreml.page_writer import write_page
from device.coreml.reference import Arithmetic
from device.coreml.template import build_package, build_template

pytestmark = [pytest.mark.coreml, pytest.mark.timeout(900)]
PRODUCT = PageGeometry(4, 256, 256, 48)


def test_a_page_from_q8_0_rows_is_identical_to_a_build_and_within_bounds(tmp_path):
    template = build_template(PRODUCT, tmp_path)
    rng = np.random.default_rng(0)
    rows = np.zeros((2, PAGE_TOKENS - 5, 4 * 256 // 32), Q8_0)
    rows["scale"] = rng.uniform(0.002, 0.02, rows.shape)
    rows["quants"] = rng.integers(-127, 128, (*rows.shape, 32), dtype=np.int8)
    constants = PageConstants.allocate(PRODUCT)
    constants.fill(*rows.view(np.uint8).reshape(2, PAGE_TOKENS - 5, -1), GGML_Q8_0)
    written, built = tmp_path / "written.mlpackage", tmp_path / "built.mlpackage"
    write_page(template, constants, written)
    build_package(PRODUCT, constants.by_name(), built)
    for file in (*template.package_files, template.weight_file):
        assert (written / file).read_bytes() == (built / file).read_bytes()
    assert len(blob.verify(written / template.weight_file)) == 16 + 2 * 4 * 16
    check = check_page(written)
    assert check.passed and check.n_keys == PAGE_TOKENS - 5


def to_int8(x, axis):
    """x rounded to 127 steps of its largest magnitude along an axis."""
    scale = np.abs(x).max(axis, keepdims=True) / 127
    return np.round(x / scale) * scale


@pytest.mark.parametrize("case", ["realistic", "smooth", "peaky", "very peaky", "sink"])
def test_int8_pages_would_be_far_worse(tmp_path, case):
    """Why pages are fp16: int8 K and V with the best of three scalings, all else exact, against fp16 pages."""
    geometry = PageGeometry(1, 256, 256, 8)
    inputs = make_inputs(case, geometry)
    out, _ = attend_float64(inputs)
    errors = []
    for k_axis, v_axis in ((-1, -2), (-2, -2), (-1, -1)):  # a scale a key or a channel
        k, v = to_int8(inputs.k.astype(np.float64), k_axis), to_int8(inputs.v.astype(np.float64), v_axis)
        found, _ = attend_float64(Inputs(inputs.queries, k, v))
        errors.append((np.linalg.norm(found - out, axis=-1) / np.linalg.norm(out, axis=-1)).max())
    (fp16,) = measure(geometry, tmp_path, [case], [Arithmetic()])
    assert min(errors) > 5 * fp16.o_later


@pytest.mark.parametrize("case", CASES)
def test_bounds_hold_at_full_size(tmp_path, case):
    results = list(measure(PageGeometry(1, 256, 256, 8), tmp_path, [case]))
    assert len(results) == len(ARITHMETICS)
    for result in results:
        o, lse = BOUNDS[result.arithmetic.accumulator]
        assert max(result.o_first, result.o_later) < o, result
        assert max(result.lse_first, result.lse_later) < lse, result

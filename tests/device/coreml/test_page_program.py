"""Aim: a page program is partial attention: exact within the stated bound, for any geometry, fill and centre.

Method: pages are written from templates, run by the interpreter under each arithmetic, and compared with float64; pages
merged by their accumulators equal one attention over all keys.
"""

import numpy as np
import pytest

from common.errors import EngineError
from device.coreml import accuracy, blob
from device.coreml.accuracy import ARITHMETICS, BOUNDS, CASES, ask, attend_float64, constants_of, row_errors
from device.coreml.geometry import PageGeometry
from device.coreml.page_program import pack_queries, unpack_partials
from device.coreml.page_writer import write_page
from device.coreml.reference import Arithmetic, Program
from device.coreml.template import find_template

GEOMETRIES = [
    PageGeometry(1, 64, 64, 8, 256),
    PageGeometry(2, 64, 32, 5, 768, 256),
    PageGeometry(3, 48, 80, 1, 512),
]
BOUND_O, BOUND_LSE = BOUNDS["fp32"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("pages")


@pytest.fixture(scope="module")
def page(folder):
    """page(geometry, inputs, arithmetic) -> a loaded program holding the inputs' keys."""

    def make(geometry, inputs, *arithmetic, name="page"):
        path = folder / f"{name}-{geometry.name}.mlpackage"
        write_page(find_template(geometry, folder), constants_of(geometry, inputs), path)
        return Program.load(path, Arithmetic(*arithmetic))

    return make


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_page_equals_float64(page, geometry):
    inputs = accuracy.make_inputs("realistic", geometry)
    partial = ask(page(geometry, inputs), geometry, inputs.queries)
    o, lse = row_errors(partial, attend_float64(inputs))
    assert o < BOUND_O and lse < BOUND_LSE


@pytest.mark.parametrize("n_keys", [1, 255, 256, 300, 767])
def test_partly_filled_pages_hold_their_keys_only(page, n_keys):
    geometry = GEOMETRIES[1]
    inputs = accuracy.make_inputs("peaky", geometry, n_keys)
    o, lse = row_errors(ask(page(geometry, inputs), geometry, inputs.queries), attend_float64(inputs))
    assert o < BOUND_O and lse < BOUND_LSE


def test_fewer_rows_than_the_program_takes(page):
    geometry = GEOMETRIES[0]
    inputs = accuracy.make_inputs("realistic", geometry)
    program = page(geometry, inputs)
    few, all_rows = ask(program, geometry, inputs.queries[:, :3]), ask(program, geometry, inputs.queries)
    for a, b in zip(few, all_rows, strict=True):
        np.testing.assert_array_equal(a, b[:, :3])


def test_pages_merge_to_one_attention(page):
    geometry = GEOMETRIES[1]
    whole = accuracy.make_inputs("smooth", geometry, 2 * geometry.page_tokens)
    halves = [
        accuracy.Inputs(whole.queries, whole.k[:, part], whole.v[:, part])
        for part in (slice(None, geometry.page_tokens), slice(geometry.page_tokens, None))
    ]
    a, b = (ask(page(geometry, h, name=f"half{n}"), geometry, h.queries) for n, h in enumerate(halves))
    top = np.maximum(a.m, b.m)
    l = a.l * np.exp(a.m - top) + b.l * np.exp(b.m - top)  # noqa: E741
    o = a.o * np.exp(a.m - top)[..., None] + b.o * np.exp(b.m - top)[..., None]
    found = row_errors(type(a)(top, l, o), attend_float64(whole))
    assert found[0] < BOUND_O and found[1] < BOUND_LSE


@pytest.mark.parametrize("centre", [-30.0, -1.5, 0.0, 7.25, 40.0, np.inf, -np.inf])
def test_any_centre_gives_the_same_answer(page, centre):
    geometry = GEOMETRIES[0]
    inputs = accuracy.make_inputs("peaky", geometry)
    guess = np.full(
        inputs.queries.shape[:2], min(max(centre, -60.0), 60.0) if np.isfinite(centre) else centre
    )
    if not np.isfinite(centre):
        guess[:, 1:] = 0  # one row of a call that had no keys before
    partial = ask(page(geometry, inputs), geometry, inputs.queries, guess)
    rows = slice(1, None) if not np.isfinite(centre) else slice(None)
    oracle = tuple(x[:, rows] for x in attend_float64(inputs))
    o, lse = row_errors(type(partial)(*(x[:, rows] for x in partial)), oracle)
    assert o < 10 * BOUND_O and lse < 10 * BOUND_LSE  # a centre of 40 costs digits, not correctness


@pytest.mark.parametrize("case", CASES)
def test_stated_bounds_hold_for_every_case_and_arithmetic(folder, case):
    geometry = PageGeometry(1, 64, 64, 4, 1024)
    for result in accuracy.measure(geometry, folder, [case]):
        o, lse = BOUNDS[result.arithmetic.accumulator]
        assert max(result.o_first, result.o_later) < o, result
        assert max(result.lse_first, result.lse_later) < lse, result


def test_accumulators_differ(folder):
    results = list(accuracy.measure(PageGeometry(1, 64, 64, 4, 1024), folder, ["all equal"]))
    by_name = {r.arithmetic.accumulator: r.lse_first for r in results}
    assert len(results) == len(ARITHMETICS) and by_name["in-order"] > 3 * by_name["fp32"]


@pytest.mark.parametrize("damage", ["swap", "shift"])
def test_wrong_constants_break_the_bound(page, folder, damage):
    geometry = PageGeometry(1, 31, 32, 4, 256)  # K with its column of ones has the size of V
    inputs = accuracy.make_inputs("peaky", geometry)
    constants = constants_of(geometry, inputs)
    k, v = constants.k.copy().reshape(-1), constants.v.copy().reshape(-1)
    changed = {"swap": (v, k), "shift": (np.roll(k, 32), v)}[damage]
    template = find_template(geometry, folder)
    path = folder / f"{damage}.mlpackage"
    write_page(template, constants, path)
    blob.patch(
        path / template.weight_file,
        dict(zip(template.offsets[1:], map(blob.Blob.of, changed), strict=True)),
    )
    o, _ = row_errors(ask(Program.load(path), geometry, inputs.queries), attend_float64(inputs))
    assert o > 20 * BOUND_O


def test_wrong_shapes_are_named():
    geometry = GEOMETRIES[0]
    for shape in ((2, 3, 64), (1, 9, 64), (1, 0, 64), (1, 3, 63)):
        with pytest.raises(EngineError, match="do not fit a page program"):
            pack_queries(geometry, np.zeros(shape, np.float32), None)
    with pytest.raises(EngineError, match=r"centre of shape \(1, 2\), expected \(1, 3\)"):
        pack_queries(geometry, np.zeros((1, 3, 64), np.float32), np.zeros((1, 2)))


def test_infinities_are_not_passed_on(page):
    geometry = GEOMETRIES[0]
    inputs = accuracy.make_inputs("realistic", geometry)
    queries = inputs.queries.copy()
    queries[0, 2] = 1e6
    program = page(geometry, inputs)
    outputs = program.predict({"queries": pack_queries(geometry, queries, None)})
    with pytest.raises(EngineError, match="returned infinities or NaN"):
        unpack_partials(geometry, outputs, queries.shape[1], None)

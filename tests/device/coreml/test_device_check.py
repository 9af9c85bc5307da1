"""Aim: the report of `device-check` is whole on every platform and says what was not run.

Method: the check on a small page; on systems without Core ML its Core ML part must say why, the rest must be figures
within bounds. The exported sample is read back as a phone's program would read it.
"""

import json
import sys

import numpy as np
import pytest

from device.coreml.accuracy import BOUNDS, attend_float64, make_inputs
from device.coreml.device_check import CASE, check_device, distance, export
from device.coreml.geometry import PageGeometry
from device.coreml.page_program import PagePartial, unpack_partials
from device.coreml.reference import Program

GEOMETRY = PageGeometry(2, 32, 32, 4, 512, 256)


def test_the_report(tmp_path):
    said = []
    found = check_device(GEOMETRY, tmp_path, said.append)
    assert json.loads(json.dumps(found)) == found and said
    assert found["geometry"] == GEOMETRY.name and found["machine"]["numpy"] == np.__version__
    assert {name.split(",")[0] for name in found["interpreter"]} == {"fp32", "block64"}
    for name, errors in found["interpreter"].items():
        assert 0 < errors["o_error"] < BOUNDS[name.split(",")[0]][0]
    if sys.platform != "darwin":
        assert found["core_ml"]["available"] is False
        assert "runs on macOS" in found["core_ml"]["why"] and "latency" in found["core_ml"]["not_run"]


@pytest.mark.device
@pytest.mark.skipif(sys.platform != "darwin", reason="needs Core ML")
def test_the_report_on_a_mac(tmp_path):
    found = check_device(GEOMETRY, tmp_path, print, ("CPU_ONLY",))["core_ml"]["CPU_ONLY"]
    assert found["o_error"] < BOUNDS["block64"][0]


def test_distance_is_zero_only_for_equal_answers():
    rng = np.random.default_rng(0)
    a = PagePartial(np.zeros((1, 2)), np.ones((1, 2)), rng.standard_normal((1, 2, 8)))
    assert distance(a, a) == 0
    assert distance(a._replace(o=a.o * 1.5), a) == 0.5


def test_an_exported_sample_can_be_run_elsewhere(tmp_path):
    page, questions, answers, described = export(GEOMETRY, tmp_path / "sample")
    text = json.loads(described.read_text())
    queries = np.fromfile(questions, "<f2").reshape(text["queries.f16"]["shape"])
    outputs = Program.load(page).predict({text["queries.f16"]["input"]: queries})
    partial = unpack_partials(GEOMETRY, outputs, GEOMETRY.n_rows, None)
    expected = np.fromfile(answers, "<f4")
    n_out = int(np.prod(text["answers.f32"]["normalised output"]))
    found = partial.o / partial.l[..., None]
    np.testing.assert_allclose(found.reshape(-1), expected[:n_out], atol=0.05)
    out, lse = attend_float64(make_inputs(CASE, GEOMETRY))
    np.testing.assert_allclose(expected, np.concatenate([out.reshape(-1), lse.reshape(-1)]), rtol=1e-6)

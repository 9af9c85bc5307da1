"""`outrigger fp16-check` as it is typed: the table, the choice, the picture and the figures."""

import json

import pytest
from click.testing import CliRunner

from common.errors import SettingError
from common.model.synthetic import ensure_preset
from services.bench.peaks_drawing import by_layer
from services.cli.fp16_check import command


def test_a_model_is_examined(tmp_path):
    pytest.importorskip("coremltools", exc_type=ImportError)
    pytest.importorskip("matplotlib")
    plot = tmp_path / "peaks.svg"
    done = CliRunner().invoke(
        command, [str(ensure_preset("tiny-sliding")), "--tokens", "24", "-o", str(plot), "--json"]
    )
    assert done.exit_code == 0, done.output or done.exception
    lines = done.stdout.splitlines()
    figures = json.loads(lines[-1])
    assert figures["tokens"] == 24 and figures["scale"] == 1.0 and figures["overflows"] == []
    assert figures["unscaled"]["first_nan"] is None
    assert sum("holds" in line for line in lines) == 12 + 2
    assert any("as it is, tried in fp16: finite" in line for line in lines)
    assert "65,504" in plot.read_text()


def test_only_what_can_be_drawn_is_written(tmp_path):
    done = CliRunner().invoke(command, [str(tmp_path), "-o", "peaks.png"])
    assert isinstance(done.exception, SettingError)


def test_a_layers_residual_is_the_larger_of_its_sums():
    peaks = {(-1, "embedding"): 1.0, (0, "mid"): 3.0, (0, "residual"): 2.0, (0, "mlp"): 9.0}
    assert by_layer(peaks, "residual") == [(-1, 1.0), (0, 3.0)]
    assert by_layer(peaks, "mlp") == [(0, 9.0)]

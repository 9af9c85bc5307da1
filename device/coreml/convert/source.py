"""Opens a model for conversion: a Hugging Face folder or a GGUF file. Called by the commands, benches and tests."""

from __future__ import annotations

from pathlib import Path

from common.errors import ModelError
from device.coreml.convert.description import GemmaModel
from device.coreml.convert.gguf_model import open_gguf
from device.coreml.convert.huggingface import open_checkpoint


def open_model(path: Path | str) -> GemmaModel:
    """Raises ModelError saying what was found and what is converted."""
    path = Path(path)
    if path.is_dir():
        return open_checkpoint(path)
    if path.suffix == ".gguf":
        return open_gguf(path)
    if not path.exists():
        raise ModelError(f"{path}: not there; give a Hugging Face folder or a .gguf file")
    raise ModelError(f"{path}: neither a Hugging Face folder nor a .gguf file")

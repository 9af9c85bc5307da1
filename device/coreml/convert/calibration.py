"""Token ids of a calibration text in a model's own vocabulary: for `--fp16-scale auto`, and for proofs.

A GGUF carries its vocabulary. A checkpoint folder's tokenizer.json needs the `tokenizers` package, which is asked for
by name when it is missing. Called by services.cli.convert and services.cli.bundle.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from common.errors import ModelError, SettingError
from common.ggml.stock import StockModel

TEXT = (
    "The outrigger keeps a narrow boat upright: a float held at a distance by two booms. In 1778 a lieutenant counted "
    "seventy of them in one bay.\n\n# Notes\n\n1. def area(r): return 3.14159 * r ** 2\n2. Що ви знаєте про море? "
    "Човен із балансиром не перевертається.\n3. Der Ausleger trägt nur, wenn der Wind dreht; sonst schwimmt er mit.\n\n"
    '{"speed_kn": 17.5, "crew": ["Ana", "Bo"], "ok": true}\n\nQuestion: why does the float lie to windward? Answer: '
    "because its weight, not its buoyancy, holds the hull down when the sail pulls.\n"
)
"""Prose, lists, code, JSON and three languages: peaks differ by kind of text."""
BOS = 2
"""Gemma's first token; the largest activations are often its."""


def calibration_tokens(path: Path, text: str | None = None) -> np.ndarray:
    """i32 [n] of `text` (or TEXT), beginning with BOS. Raises ModelError, SettingError."""
    read = _of_gguf if path.suffix == ".gguf" else _of_folder
    ids = read(path, TEXT if text is None else text)
    return np.concatenate([[BOS], ids]).astype(np.int32)


def _of_gguf(path: Path, text: str) -> np.ndarray:
    stock = StockModel(path, repack=False)
    try:
        return stock.tokenize(text)
    finally:
        stock.close()


def _of_folder(folder: Path, text: str) -> np.ndarray:
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ModelError(f"{file}: not there; without it no text can be measured: give --fp16-scale a number")
    try:
        import tokenizers
    except ImportError as error:
        raise SettingError(
            "reading tokenizer.json needs the package tokenizers: pip install tokenizers, or give --fp16-scale a number"
        ) from error
    encoded = tokenizers.Tokenizer.from_file(str(file)).encode(text, add_special_tokens=False)
    return np.array(encoded.ids, np.int32)

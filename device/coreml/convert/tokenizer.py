"""tokenizer.json from a GGUF's vocabulary."""

from __future__ import annotations

from pathlib import Path


def write_tokenizer(gguf: Path, folder: Path) -> list[Path]:
    return []

"""The tail file of the worker that runs on this machine: cut from the model once, kept by fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

from common.model.spec import ModelSpec
from common.model.split import plan_split, write_tail

FOLDER = "tails"


def tail_path(data_dir: Path, spec: ModelSpec, layer: int) -> Path:
    """Where the tail [layer, n) of this very model is kept: a changed model of the same name gets another file."""
    text = f"{spec.fingerprint_text(layer)}\n{spec.path.stat().st_size}"
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    return data_dir / FOLDER / f"{spec.path.stem}-L{layer}-{digest}.gguf"


def tail_for(
    model: Path, layer: int | None, data_dir: Path, progress: Callable[[int, int], None] | None = None
) -> Path:
    """The tail file of `model` from `layer` on (None: the default boundary), written now if it is not there yet.

    The file appears under its name only when it is whole. Raises ModelError, SettingError.
    """
    spec = ModelSpec.read(model)
    plan = plan_split(spec, layer, any_layer=True)
    path = tail_path(data_dir, spec, plan.layer)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tail(model, plan.layer, path, progress=progress)
    return path

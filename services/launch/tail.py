"""The tail file of the worker that runs on this machine: cut from the model once, kept by fingerprint."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path

import psutil

from common.model.spec import ModelSpec
from common.model.split import plan_split, write_tail

FOLDER = "tails"
SHARE_LOW = 3 / 8
"""Where the worker's file begins when memory allows: the host may then move the split down to there."""
MEMORY_PER_FILE = 3.0
"""The low file is taken when the machine has so many times the model's size to spare: host and worker are both here."""


def tail_path(data_dir: Path, spec: ModelSpec, layer: int) -> Path:
    """Where the tail [layer, n) of this very model is kept: a changed model of the same name gets another file."""
    text = f"{spec.fingerprint_text(layer)}\n{spec.path.stat().st_size}"
    digest = hashlib.blake2b(text.encode(), digest_size=6).hexdigest()
    return data_dir / FOLDER / f"{spec.path.stem}-L{layer}-{digest}.gguf"


def lowest_layer(spec: ModelSpec, memory_free_bytes: int) -> int:
    """First layer of the worker's file when none is set: lower than where the split begins, if memory allows."""
    default = plan_split(spec).layer
    boundaries = range(spec.cycle, default + 1, spec.cycle)
    if memory_free_bytes < MEMORY_PER_FILE * spec.file_bytes or not boundaries:
        return default
    return min(boundaries, key=lambda layer: abs(layer - SHARE_LOW * spec.n_layer_full))


def tail_for(
    model: Path, layer: int | None, data_dir: Path, progress: Callable[[int, int], None] | None = None
) -> Path:
    """The tail file of `model` from `layer` on (None: as `lowest_layer` says), written now if it is not there yet.

    The file appears under its name only when it is whole. Raises ModelError, SettingError.
    """
    spec = ModelSpec.read(model)
    if layer is None:
        layer = lowest_layer(spec, psutil.virtual_memory().available)
    plan = plan_split(spec, layer, any_layer=True)
    path = tail_path(data_dir, spec, plan.layer)
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_tail(model, plan.layer, path, progress=progress)
    return path

"""The check at the first start on a machine: do graphs built here equal stock llama.cpp, to the bit, in this build?

A wheel whose structs or operations differ from what common/ggml declares would compute nonsense or fault. So tiny
models of random weights, one of each architecture, are run beside stock, in a child process
(`python -m common.engine.first_start`), because a fault ends the process. A pass is remembered by wheel, libraries and
processor. Used by services/mac and device/worker.
"""

from __future__ import annotations

import hashlib
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import EngineError, ModelError
from common.ggml.backend import devices
from common.ggml.ffi import LIBRARIES, WHEEL, WHEEL_VERSION, library_path
from common.ggml.stock import StockContext, StockModel
from common.model.embedded import models_folder
from common.model.geometry import Geometry
from common.model.synthetic import write_synthetic

from .engine import Engine
from .parity import ParityCount, compare
from .weights import WeightLayout

CHECK_SECONDS_MAX = 120
LAYOUTS: tuple[WeightLayout, ...] = ("plain", "repack")
N_CTX, N_PROMPT, N_GENERATED = 512, 259, 8
TINY: dict[str, Any] = dict(
    n_layer=4, n_embd=64, n_ff=128, n_head=4, n_head_kv=2, head_dim=32, state_dim=16, n_vocab=200
)
MODELS: tuple[tuple[str, str, int, dict[str, Any]], ...] = (
    ("llama", "q4_0", 2, {}),
    ("qwen35", "q8_0", 2, {}),
    # Of eight layers the sixth sees everything, the others the last 64 tokens, far fewer than a prompt.
    ("gemma3", "q4_0", 6, {"n_layer": 8, "interval": 6, "window": 64, "rope_linear_factor": 8.0}),
)
"""Architecture, type of its weights, where it is cut, and what differs from TINY."""

CHILD = (sys.executable, "-m", "common.engine.first_start")


def check_first_start(cache_folder: Path | None = None, child: Sequence[str] = CHILD) -> None:
    """Runs the check unless it has passed before with these libraries on this processor. Raises EngineError.

    cache_folder: where a pass is remembered, by default beside the models. child: the command that checks.
    """
    cache_folder = cache_folder or models_folder().parent / "checks"
    passed = cache_folder / f"parity-{machine_key()}"
    if passed.exists():
        return
    root = Path(__file__).resolve().parents[2]
    try:
        done = subprocess.run(
            child, cwd=root, capture_output=True, text=True, timeout=CHECK_SECONDS_MAX, check=False
        )
    except subprocess.TimeoutExpired:
        raise EngineError(f"the first-start check did not end within {CHECK_SECONDS_MAX} s") from None
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise EngineError(
            f"{WHEEL} {WHEEL_VERSION} on this machine fails the first-start check (status {done.returncode}): "
            f"{said[-1] if said else 'nothing said'}; build it again with `make setup`"
        )
    cache_folder.mkdir(parents=True, exist_ok=True)
    passed.write_text(done.stdout)


def machine_key() -> str:
    """Short hash that changes with the wheel, its libraries' files and the processor."""
    facts = [
        f"{len(MODELS)} models",
        WHEEL_VERSION,
        platform.machine(),
        *(f"{d.name} {d.description}" for d in devices()),
    ]
    for name in LIBRARIES:
        status = library_path(name).stat()
        facts.append(f"{name} {status.st_size} {status.st_mtime_ns}")
    return hashlib.blake2b("\n".join(facts).encode(), digest_size=8).hexdigest()


def compare_tiny_models() -> ParityCount:
    """Every architecture, both layouts, split in the middle, every row of a prompt and some decoding."""
    total = ParityCount()
    with tempfile.TemporaryDirectory() as folder:
        for arch, storage, cut, changes in MODELS:
            path = Path(folder, f"{arch}.gguf")
            write_synthetic(Geometry(arch=arch, **(TINY | changes)), path, storage=storage)
            tokens = np.random.default_rng(1).integers(0, TINY["n_vocab"], N_PROMPT).astype(np.int32)
            for weights in LAYOUTS:
                model = StockModel(path, repack=weights == "repack")
                stock = StockContext(model, n_ctx=N_CTX)
                with Engine.load(path, n_ctx=N_CTX, weights=weights, device="cpu") as engine:
                    total += compare(engine, stock, tokens, N_GENERATED, cuts=[cut], logits="all")
                stock.close()
                model.close()
    return total


if __name__ == "__main__":
    try:
        count = compare_tiny_models()
    except (EngineError, ModelError) as error:
        raise SystemExit(str(error)) from None
    if count.equal != count.compared:
        raise SystemExit(
            f"{count.compared - count.equal} of {count.compared} rows differ from stock llama.cpp, by up to "
            f"{count.difference_max:.3g}"
        )
    print(f"{count.equal} of {count.compared} rows equal")

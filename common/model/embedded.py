"""Where models are kept: the embedded one, SmolLM2-135M-Instruct, Q4_1 (Apache-2.0), put there by `make setup`, and
Gemma 3 270M, Q4_K_M (Gemma Terms of Use), put there when asked for.

Knows names and places only. Called by whoever needs a model without being given one.
"""

from __future__ import annotations

from pathlib import Path

from common.errors import ModelError

EMBEDDED_NAME = "smollm2-135m-instruct-q4_1.gguf"
GEMMA3_NAME = "gemma-3-270m-q4_k_m.gguf"
_CHECKOUT = Path(__file__).resolve().parents[2]


def models_folder() -> Path:
    """`.outrigger/models` of the checkout; of the working directory when the package is installed elsewhere."""
    root = _CHECKOUT if (_CHECKOUT / "pyproject.toml").exists() else Path.cwd()
    return root / ".outrigger" / "models"


def embedded_model() -> Path:
    """Path of the embedded model. Raises ModelError when set-up has not put it there."""
    path = models_folder() / EMBEDDED_NAME
    if not path.exists():
        raise ModelError(
            f"the embedded model is not there ({path}); run `make setup`, or name a GGUF file with --model"
        )
    return path


def gemma3_model() -> Path:
    """Path of Gemma 3 270M. Raises ModelError when nobody has fetched it."""
    path = models_folder() / GEMMA3_NAME
    if not path.exists():
        raise ModelError(
            f"Gemma 3 270M is not there ({path}); its licence is the Gemma Terms of Use (ai.google.dev/gemma/terms); "
            "fetch it with `outrigger models get gemma3-270m`"
        )
    return path

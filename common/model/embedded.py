"""Where models are kept, and the embedded one: SmolLM2-135M-Instruct, Q4_1 (Apache-2.0), put there by `make setup`.

Knows names and places only. Called by whoever needs a model without being given one.
"""

from __future__ import annotations

from pathlib import Path

from common.errors import ModelError

EMBEDDED_NAME = "smollm2-135m-instruct-q4_1.gguf"
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

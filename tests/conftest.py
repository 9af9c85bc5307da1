"""What every test may lean on: the two small models, and how hypothesis behaves here.

Properties have no deadline (two busy cores make any time limit a coin toss; pytest-timeout catches what hangs), and on
CI they run the same examples each time, so that a red run can be repeated.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

CHECKOUT = Path(__file__).resolve().parent.parent
MODELS = CHECKOUT / ".outrigger" / "models"
SMOLLM2 = MODELS / "smollm2-135m-instruct-q4_1.gguf"
GEMMA3 = MODELS / "gemma-3-270m-q4_k_m.gguf"

settings.register_profile("here", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


@pytest.fixture(scope="session")
def checkout() -> Path:
    """Top of the source tree."""
    return CHECKOUT


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """Path of the embedded model. A missing file is a failure, not a skip: `make setup` puts it there."""
    if not SMOLLM2.exists():
        pytest.fail(f"the embedded model is missing ({SMOLLM2}): run `make setup`", pytrace=False)
    return SMOLLM2


@pytest.fixture(scope="session")
def gemma3() -> Path:
    """Path of Gemma 3 270M. A missing file is a failure, not a skip: `make test` puts it there."""
    if not GEMMA3.exists():
        pytest.fail(
            f"the model Gemma 3 270M is missing ({GEMMA3}): run `make test`, or "
            "`.venv/bin/outrigger models get gemma3-270m`",
            pytrace=False,
        )
    return GEMMA3

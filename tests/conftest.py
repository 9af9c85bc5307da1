"""What every test may lean on: the embedded model, and how hypothesis behaves here.

Properties have no deadline (two busy cores make any time limit a coin toss; pytest-timeout catches what hangs), and on
CI they run the same examples each time, so that a red run can be repeated.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import settings

CHECKOUT = Path(__file__).resolve().parent.parent
SMOLLM2 = CHECKOUT / ".outrigger" / "models" / "smollm2-135m-instruct-q4_1.gguf"

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

"""One running system for all journeys; one that hurts it waits until it is whole again."""

from __future__ import annotations

import pytest

from tests.journey.system import running_system


@pytest.fixture(scope="session")
def system(smollm2):
    with running_system("--model", str(smollm2), "--n-ctx", "2048") as system:
        yield system

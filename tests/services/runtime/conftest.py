"""A private run directory with a short path: socket paths have a limit, pytest's own directories are long."""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

import pytest


@pytest.fixture
def run_dir():
    path = Path(tempfile.mkdtemp(prefix="outrigger-test-"))
    yield path
    shutil.rmtree(path)

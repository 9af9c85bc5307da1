"""Whoever comes first, libllama's door or the engine's, the process has one copy of ggml's libraries.

A child process imports the door first; the libraries mapped into it are counted.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import common.ggml.llama, common.ggml.backend
paths = {line.split()[-1] for line in open("/proc/self/maps") if "libggml-cpu" in line}
assert len(paths) == 1, paths
"""


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads /proc")
def test_one_copy_of_the_kernels_is_loaded() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], check=True, timeout=60)

"""The check at the first start passes here, is not repeated, and turns a differing or faulting build into words."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from common.engine.first_start import check_first_start
from common.errors import EngineError

FAULTS = (sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
DIFFERS = (
    sys.executable,
    "-c",
    "raise SystemExit('3 of 1000 rows differ from stock llama.cpp, by up to 0.1')",
)


def test_this_build_passes_once_and_is_remembered(tmp_path: Path) -> None:
    check_first_start(tmp_path / "checks")
    (passed,) = (tmp_path / "checks").iterdir()
    n_equal, n_compared = (int(word) for word in passed.read_text().split() if word.isdigit())
    assert n_equal == n_compared > 1000
    check_first_start(tmp_path / "checks", child=FAULTS)  # not run any more


@pytest.mark.parametrize(
    ("child", "said"), [(FAULTS, r"status -11\): nothing said"), (DIFFERS, "3 of 1000 rows differ")]
)
def test_a_build_that_faults_or_differs_is_refused_and_not_remembered(
    tmp_path: Path, child: tuple[str, ...], said: str
) -> None:
    for _ in range(2):
        with pytest.raises(EngineError, match=f"fails the first-start check .*{said}.*build it again"):
            check_first_start(tmp_path, child)
    assert list(tmp_path.iterdir()) == []

"""Aim: the dashboards are what Grafana's own types allow.

Method: each JSON becomes a constant of type Dashboard, which tsc checks against `@grafana/schema`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from monitoring.panels import DASHBOARDS

pytestmark = pytest.mark.system

OPTIONS = (
    "--noEmit --strict --skipLibCheck --moduleResolution bundler --module esnext --target es2022".split()
)


def tsc(folder: Path, source: str) -> subprocess.CompletedProcess[str]:
    """Check one source beside the packages."""
    compiler = folder / "node_modules" / ".bin" / "tsc"
    if not compiler.exists():
        pytest.fail("typescript and @grafana/schema are missing: run `make test-system`", pytrace=False)
    path = folder / "dashboard.ts"
    path.write_text(
        f"import type {{ Dashboard }} from '@grafana/schema';\nexport const board: Dashboard = {source};\n"
    )
    return subprocess.run([compiler, *OPTIONS, path], cwd=folder, capture_output=True, text=True, timeout=90)


@pytest.mark.parametrize("board", DASHBOARDS, ids=lambda board: board.uid)
def test_types_are_those_of_grafana(checkout, board):
    source = (checkout / "monitoring" / "grafana" / "dashboards" / f"{board.uid}.json").read_text()
    done = tsc(checkout / ".outrigger" / "node", source)
    assert done.returncode == 0, done.stdout


def test_a_wrong_type_is_found(checkout):
    assert tsc(checkout / ".outrigger" / "node", '{ "title": 3, "schemaVersion": 36 }').returncode != 0

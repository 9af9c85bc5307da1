"""Aim: the pages bench measures real writes and compares real packages.

Method: the bench's own measurement on a small page, with its rows and figures read back; a page that differs from the
built one must not be called identical.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from device.coreml.geometry import PageGeometry
from services.bench import pages
from services.bench.report import Report

pytest.importorskip(
    "coremltools", reason="needs the extra: pip install 'outrigger[coreml]'", exc_type=ImportError
)


def test_figures_and_rows(tmp_path: Path) -> None:
    report = Report("pages", "none", quick=True, results_folder=tmp_path)
    geometry = PageGeometry(pages.N_HEAD_KV, pages.HEAD_DIM, pages.HEAD_DIM, pages.N_ROWS, 1024)
    pages._measure(report, geometry, tmp_path)
    assert report.figures["t1024.identical"] == 1
    assert report.figures["t1024.page_megabytes"] == pytest.approx(4.2, abs=0.1)
    assert report.figures["t1024.fresh_build_ms"] > report.figures["t1024.page_write_ms"] > 0
    rows = [json.loads(line) for line in (tmp_path / "pages.jsonl").read_text().splitlines()]
    assert len(rows) == pages.ROUNDS_QUICK and all(row["write_s"] > 0 for row in rows)


def test_packages_that_differ_are_not_identical(tmp_path: Path) -> None:
    for name, text in (("a", "one"), ("b", "two")):
        (tmp_path / name / "sub").mkdir(parents=True)
        (tmp_path / name / "same").write_text("same")
        (tmp_path / name / "sub" / "file").write_text(text)
    (tmp_path / "a" / "extra").write_text("")
    assert pages._compare(tmp_path / "a", tmp_path / "b") == (3, 1)


def test_help_says_what_it_does() -> None:
    text = CliRunner().invoke(pages.command, ["--help"]).output
    assert "from stored rows to a package on disk" in text

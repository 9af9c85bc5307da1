"""`outrigger bench palettise --quick`: both sides ran, and ours is not worse. No time is asserted."""

import json

import pytest
from click.testing import CliRunner

from services.bench.palettise import command


def test_a_quick_run_compares_errors(tmp_path):
    pytest.importorskip("coremltools", exc_type=ImportError)
    done = CliRunner().invoke(command, ["--quick", "--json", "--results", str(tmp_path)])
    assert done.exit_code == 0, done.output
    figures = json.loads(done.stdout.splitlines()[-1])["figures"]
    for kind in ("normal", "heavy"):
        assert figures[f"lut4-8.w2560.{kind}.error_ratio"] < 1.001
        assert figures[f"lut4-8.w2560.{kind}.s_per_m"] > 0
    assert len((tmp_path / "palettise.jsonl").read_text().splitlines()) >= 2

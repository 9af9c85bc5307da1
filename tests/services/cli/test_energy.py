"""`outrigger energy` as it is typed: one run by flags, several by files beside them, compared and drawn."""

import json

import pytest
from click.testing import CliRunner

from common.errors import SettingError
from services.cli.energy import command


def run(*arguments):
    return CliRunner().invoke(command, [str(each) for each in arguments])


@pytest.fixture
def runs(tmp_path):
    """Two runs of ten seconds at 40 and 20 percent an hour, eight of them generating."""
    for name, rate in (("gpu", 40), ("engine", 20)):
        rows = "".join(f"{i},{rate}\n" for i in range(10))
        (tmp_path / f"{name}.csv").write_text(f"time_s,percent_per_hour\n{rows}")
        (tmp_path / f"{name}.windows.csv").write_text("start_s,end_s,tokens\n1,9,16\n")
    return tmp_path


def test_runs_are_compared_and_drawn(runs):
    pytest.importorskip("matplotlib")
    plot = runs / "runs.svg"
    done = run(runs / "gpu.csv", runs / "engine.csv", "--battery-wh", 10, "-o", plot, "--json")
    assert done.exit_code == 0, done.output
    gpu, engine = json.loads(done.stdout.splitlines()[-1])["runs"]
    assert (gpu["mean_w"], gpu["joules"], gpu["joules_per_token"]) == pytest.approx((4, 32, 2))
    assert (engine["mean_w"], engine["joules"], engine["joules_per_token"]) == pytest.approx((2, 16, 1))
    row = next(line for line in done.stdout.splitlines() if "engine" in line).split()
    assert row == ["engine", "1", "8.0", "16", "2.00", "2.000", "16.0", "1.000", "0.50", "2.000"]
    assert plot.read_text().startswith("<?xml")


def test_a_window_is_given_by_hand(runs):
    done = run(runs / "gpu.csv", "--battery-wh", 10, "--window", "0:4:4", "--window", "6:10:4", "--json")
    figures = json.loads(done.stdout.splitlines()[-1])["runs"][0]
    assert (figures["n_windows"], figures["n_tokens"]) == (2, 8)
    assert figures["joules_per_token"] == pytest.approx(4)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (("--window", "0:4:4"), "belongs to one TRACE"),
        (("-o", "runs.png"), "only .svg"),
        (("--battery-wh", 0), "Wh"),
    ],
)
def test_flags_that_do_not_fit(runs, flags, told):
    done = run(runs / "gpu.csv", runs / "engine.csv", "--battery-wh", 10, *flags)
    assert isinstance(done.exception, SettingError) and told in str(done.exception)

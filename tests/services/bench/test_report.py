"""Aim: a report is readable by people and machines and cannot claim what was not measured.
Method: real Report objects write to memory and to a temporary folder; their output is parsed again."""

from __future__ import annotations

import io
import json
import platform

import click
import pytest
from click.testing import CliRunner

from services.bench.report import NotMeasuredError, Report, report_options
from services.cli.bench import BENCHES, command


def make_report(tmp_path, as_json=True):
    out, err = io.StringIO(), io.StringIO()
    return Report("sample", "m", as_json=as_json, results_folder=tmp_path, out=out, err=err), out, err


def test_last_line_is_one_json_object_with_the_agreed_keys(tmp_path):
    report, out, err = make_report(tmp_path)
    report.progress("half way")
    report.ran("host", {"backend": "CPU", "weights": {"repack": 51}})
    report.note("not a quiet machine")
    report.figure("m.d0.speedup", 1.4321987, worker_tokens=10)
    report.figure("compared", 12)
    report.finish()
    last = json.loads(out.getvalue().splitlines()[-1])
    assert list(last) == ["bench", "commit", "machine", "model", "figures"]
    assert last["figures"] == {"m.d0.speedup": 1.4322, "compared": 12}
    assert "backend CPU, weights (repack 51)" in out.getvalue() and "not a quiet machine" in out.getvalue()
    assert "half way" in err.getvalue() and "half way" not in out.getvalue()


def test_machine_has_cores_and_no_host_name(tmp_path):
    report, _, _ = make_report(tmp_path)
    assert "core" in report.machine
    assert platform.node() not in report.machine


def test_without_json_the_table_still_names_every_figure(tmp_path):
    report, out, _ = make_report(tmp_path, as_json=False)
    report.figure("alpha.beta", 2.5)
    report.finish()
    assert "alpha.beta" in out.getvalue() and "2.5" in out.getvalue()
    assert not out.getvalue().rstrip().endswith("}")


@pytest.mark.parametrize(
    "value, evidence", [(1.5, {"worker_tokens": 0}), (float("nan"), {}), (float("inf"), {"n": 1})]
)
def test_a_figure_of_something_that_did_not_run_is_refused(tmp_path, value, evidence):
    report, _, _ = make_report(tmp_path)
    with pytest.raises(NotMeasuredError):
        report.figure("speedup", value, **evidence)
    with pytest.raises(NotMeasuredError, match="measured nothing"):
        report.finish()


def test_a_figure_needs_a_plain_name(tmp_path):
    report, _, _ = make_report(tmp_path)
    with pytest.raises(NotMeasuredError, match="letters"):
        report.figure("speed up", 1.0)


def test_rows_are_appended_and_carry_their_origin(tmp_path):
    for read_s in (1.0, 2.0):
        make_report(tmp_path)[0].row(read_s=read_s)
    rows = [json.loads(line) for line in (tmp_path / "sample.jsonl").read_text().splitlines()]
    assert [row["read_s"] for row in rows] == [1.0, 2.0]
    assert all(row["bench"] == "sample" and row["machine"] and row["commit"] for row in rows)


def test_options_are_shared_by_all_benches():
    @click.command()
    @report_options
    def bench(as_json, quick, results_folder):
        click.echo(f"{as_json} {quick} {results_folder}")

    result = CliRunner().invoke(bench, ["--json", "--quick", "--results", "x"])
    assert result.output == "True True x\n"


def test_bench_group_lists_without_importing_and_refuses_unknown_names():
    listed = CliRunner().invoke(command, ["--help"])
    assert all(name in listed.output for name in BENCHES)
    assert CliRunner().invoke(command, ["nonsense"]).exit_code == 2

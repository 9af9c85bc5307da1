"""Aim: watts, joules and joules a token are what one computes by hand; what cannot be trusted is told or refused.

Method: traces small enough to be computed on paper, as objects and as files of both kinds. With a battery of 10 Wh, one
percent an hour is 0.1 W.
"""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import SettingError
from services.bench.energy.drawing import svg_of
from services.bench.energy.integral import Window, energy_in, integrate, watts
from services.bench.energy.samples import Sample, Trace, read_trace
from services.bench.energy.windows import parse_window, windows_beside

WH = 10.0
# Ten seconds: 20 %/h (2 W) while it rests, 50 (5 W) from 3 s to 7 s, while it generates.
RATES = [20, 20, 20, 50, 50, 50, 50, 20, 20, 20]


def trace(rates=RATES, missing=()):
    return Trace(
        "run", tuple(Sample(float(i), 1.0, rate) for i, rate in enumerate(rates) if i not in missing)
    )


def test_units():
    assert watts(1, 10) == pytest.approx(0.1)
    assert watts(25.9, 13.9) == pytest.approx(3.6001)


def test_only_windows_count():
    found = integrate(trace(), [Window(3, 7, 8)], WH)
    assert (found.mean_w, found.joules, found.joules_per_token) == pytest.approx((5.0, 20.0, 2.5))
    assert found.outside_w == pytest.approx(2.0)  # six seconds of 2 W
    assert found.tokens_per_s == 2.0
    assert found.notes == () and found.missing_s == 0


def test_edges_between_samples_are_shared_out():
    # 2.5 to 7.5: half a second of 2 W, four of 5 W, half a second of 2 W.
    found = integrate(trace(), [Window(2.5, 7.5, 11)], WH)
    assert found.joules == pytest.approx(22.0)
    assert found.mean_w == pytest.approx(4.4)


def test_several_windows_are_one_run():
    found = integrate(trace(), [Window(7, 9, 1), Window(0, 4, 2)], WH)
    assert found.joules == pytest.approx(2 * 2 + 3 * 2 + 1 * 5)
    assert (found.n_windows, found.n_tokens, found.seconds) == (2, 3, 6)


def test_missing_samples_are_told_and_taken_at_the_mean():
    found = integrate(trace([30] * 20, missing={5}), [Window(0, 20, 10)], WH)
    assert found.missing_s == 1.0
    assert found.joules == pytest.approx(60.0)
    assert "1.0 s without samples" in found.notes[0]
    with pytest.raises(SettingError, match=r"cover 2.0 of the 4.0 s"):
        integrate(trace(missing={4, 5}), [Window(3, 7, 8)], WH)
    with pytest.raises(SettingError, match="goes from 0 to 10 s"):
        integrate(trace(), [Window(100, 104, 8)], WH)


@pytest.mark.parametrize(
    ("windows", "told"),
    [
        ([Window(1, 5, 3), Window(4, 6, 3)], "overlap: 1 to 5 s and 4 to 6 s"),
        ([Window(5, 5, 3)], "empty"),
        ([Window(5, 4, 3)], "empty"),
        ([Window(1, 4, 0)], "0 tokens"),
        ([], "no window"),
    ],
)
def test_windows_that_cannot_be(windows, told):
    with pytest.raises(SettingError, match=told):
        integrate(trace(), windows, WH)


def test_a_battery_in_another_unit_is_refused():
    with pytest.raises(SettingError, match="milliampere-hours"):
        integrate(trace(), [Window(3, 7, 8)], 3582)


@given(st.lists(st.floats(0, 100), min_size=2, max_size=30), st.floats(0, 1), st.floats(0, 1))
def test_parts_of_a_window_add_up(rates, a, b):
    samples, end_s = trace(rates).samples, len(rates)
    first, middle = sorted((a * end_s, b * end_s))
    whole, left, right = (
        energy_in(samples, Window(*ends, 1), WH)
        for ends in ((first, end_s), (first, middle), (middle, end_s))
    )
    assert whole[0] == pytest.approx(left[0] + right[0], abs=1e-9)
    assert whole[1] == pytest.approx(left[1] + right[1], abs=1e-9)


def test_a_csv_is_read(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text(
        "time_ms, percent_per_hour, thermal\n0,20,0\n1000,50,0\n2000,20,0\n", encoding="utf-8-sig"
    )
    read = read_trace(path)
    assert read.samples == (Sample(0, 1, 20), Sample(1, 1, 50), Sample(2, 1, 20))
    assert read.name == "run" and read.notes == ()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("time_s,power_mw\n0,3000\n1,3000\n", "watts and others are not taken"),
        ("time_s,percent_per_hour\n0,3000\n1,3000\n", "milliwatts"),
        ("time_s,percent_per_hour\n0,-3\n1,-3\n", "charging"),
        ("time_s,percent_per_hour\n0,nan\n1,3\n", "between 0 and"),
        ("time_s,percent_per_hour\n0,3\n0,3\n", "not later"),
        ("time_s,percent_per_hour\n0,3\n2,3\n1,3\n", "not later"),
        ("time_s,percent_per_hour\n0,3\n1,\n", "line 3: not two numbers"),
        ("time_s,percent_per_hour\n0,3\n", "at least two"),
        ("", "columns none"),
    ],
)
def test_csv_that_is_refused(tmp_path, text, told):
    path = tmp_path / "run.csv"
    path.write_text(text)
    with pytest.raises(SettingError, match=told):
        read_trace(path)


def test_what_looks_like_another_unit_is_told(tmp_path):
    path = tmp_path / "run.csv"
    path.write_text("time_s,percent_per_hour\n0,0.2\n1000,0.5\n2000,0.2\n")
    notes = " ".join(read_trace(path).notes)
    assert "a sample every 1000 s" in notes and "fractions" in notes


COLUMNS = [
    ("start", "Start", "start-time"),
    ("duration", "Duration", "duration"),
    ("level", "Battery rate", "rate"),
]


def export(rows, columns=COLUMNS):
    """A table as xctrace writes it: values under ids, repeated ones by reference, times in nanoseconds."""
    cols = "".join(
        f"<col><mnemonic>{a}</mnemonic><name>{b}</name><engineering-type>{c}</engineering-type></col>"
        for a, b, c in columns
    )
    return (
        '<?xml version="1.0"?>\n<trace-query-result>\n<node xpath="//trace-toc[1]/run[1]/data[1]/table[7]">'
        f'<schema name="power-table">{cols}</schema>{"".join(f"<row>{row}</row>" for row in rows)}'
        "</node></trace-query-result>\n"
    )


ROWS = [
    '<start-time id="1" fmt="00:00.500">500000000</start-time><duration id="2" fmt="1 s">1000000000</duration>'
    '<rate id="3" fmt="20 %/hr">20</rate>',
    '<start-time id="4" fmt="00:01.500">1500000000</start-time><duration ref="2"/><rate id="5" fmt="50 %/hr">50</rate>',
    '<start-time id="6" fmt="00:02.500">2500000000</start-time><duration ref="2"/><rate ref="3"/>',
    '<start-time id="7" fmt="00:03.500">3500000000</start-time><duration ref="2"/><sentinel/>',
]


def test_an_export_is_read_with_its_references(tmp_path):
    path = tmp_path / "run.xml"
    path.write_text(export(ROWS))
    assert read_trace(path).samples == (Sample(0.5, 1, 20), Sample(1.5, 1, 50), Sample(2.5, 1, 20))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        (export([row.replace("%/hr", "mW") for row in ROWS]), "no percent an hour"),
        (export([ROWS[0].partition("<duration")[0]]), "1 values, the schema 3"),
        (export([]), "0 tables"),
        (export(ROWS)[:300], "not whole XML"),
        ('<!DOCTYPE a [<!ENTITY b "c">]><a>&b;</a>', "document type"),
        (export(ROWS, [*COLUMNS[:2], ("x", "X", "y")]), "name one with --column"),
        (export(ROWS, [("a", "A", "string"), *COLUMNS[1:]]), "no column of type"),
    ],
)
def test_exports_that_are_refused(tmp_path, text, told):
    path = tmp_path / "run.xml"
    path.write_text(text)
    with pytest.raises(SettingError, match=told):
        read_trace(path)


def test_a_column_can_be_named(tmp_path):
    path = tmp_path / "run.xml"
    path.write_text(export(ROWS, [*COLUMNS[:2], ("x", "X", "y")]))
    assert read_trace(path, "x").samples[1].percent_per_hour == 50


def test_windows_are_read(tmp_path):
    assert parse_window("12.5:71:512") == Window(12.5, 71, 512)
    with pytest.raises(SettingError, match="START:END:TOKENS"):
        parse_window("12.5-71")
    run = tmp_path / "run.csv"
    with pytest.raises(SettingError, match=r"run\.windows\.csv beside it is not there"):
        windows_beside(run)
    (tmp_path / "run.windows.csv").write_text("start_s,end_s,tokens\n3,7,8\n")
    assert windows_beside(run) == [Window(3, 7, 8)]
    (tmp_path / "run.windows.csv").write_text("start_s,end_s,tokens\n3,7,many\n")
    with pytest.raises(SettingError, match="line 2"):
        windows_beside(run)
    (tmp_path / "run.windows.csv").write_text("from,to\n3,7\n")
    with pytest.raises(SettingError, match="are wanted"):
        windows_beside(run)


def test_a_picture_has_a_lane_for_each_run():
    pytest.importorskip("matplotlib")
    windows = [Window(3, 7, 8)]
    run = (trace(), windows, integrate(trace(), windows, WH))
    svg = svg_of([run, run], WH)
    assert svg.count("run: 5.00 W, 2.500 J a token") == 2

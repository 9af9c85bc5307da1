"""Aim: a read's picture shows what its stages say, on the lanes where it happened, in an order that can be. Method:
hypothesis lays out ideal pipelines; the kept file is written and cut for real; SVG, HTML and JSON are parsed."""

from __future__ import annotations

import itertools
import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from common.errors import SettingError
from common.wire.messages import ReadReport, UbatchTimes
from services.bench.drawing import html_of, svg_of
from services.bench.timeline import bars_of, busy_s, chrome_trace, title_of
from services.cli.trace import command, pick, rendered
from services.mac.read_log import FILE_NAME, KEPT, LoggedRead, ReadLog, load_reads


def pipeline(n, head, worker, way):
    """Stages of an ideal split read: the last ubatch stays on the host."""
    stages, free = [], 0.0
    for index in range(n - 1):
        sent = head * (index + 1)
        begins = max(sent + way, free)
        free = begins + worker
        stages.append(
            UbatchTimes(
                256 * index,
                256,
                head_at_s=head * index,
                head_s=head,
                worker_s=worker,
                sent_at_s=sent,
                queue_s=begins - sent - way,
                round_trip_s=free + way - sent,
                ack_at_s=free + way,
                import_s=0.001,
            )
        )
    at = max(head * n, free + way + 0.001)
    stages.append(UbatchTimes(256 * (n - 1), 256, head * (n - 1), head_s=head, tail_at_s=at, tail_s=worker))
    report = ReadReport(
        tokens_host=256,
        tokens_worker=256 * (n - 1),
        split_layer=18,
        prefill_s=at + worker,
        stages=tuple(stages),
    )
    return LoggedRead(1, 0.0, "smol", 30, report)


def alone(number=1):
    stages = tuple(UbatchTimes(256 * i, 256, head_at_s=0.1 * i, head_s=0.1) for i in range(3))
    report = ReadReport(tokens_host=768, bypass_reason="absent", prefill_s=0.3, stages=stages)
    return LoggedRead(number, 0.0, "smol", 30, report)


times = st.floats(0.01, 1.0)


@given(st.integers(2, 9), times, times, st.floats(0.0, 0.5))
def test_bars_lie_where_an_ideal_pipeline_has_them(n, head, worker, way):
    read = pipeline(n, head, worker, way)
    bars = bars_of(read.report.stages)
    on_worker = [bar for bar in bars if bar.lane == "worker"]
    assert len(on_worker) == n - 1
    for before, after in itertools.pairwise(on_worker):
        assert after.at_s >= before.end_s - 1e-9, "the worker does one thing at a time"
    for bar in on_worker:
        out, home = (b for b in bars if b.lane == "link" and b.ubatch == bar.ubatch)
        assert out.end_s <= bar.at_s + 1e-9 and home.at_s == pytest.approx(bar.end_s)
        assert home.end_s == pytest.approx(read.report.stages[bar.ubatch].ack_at_s)
    assert busy_s(bars, "worker") == pytest.approx(worker * (n - 1))
    assert busy_s(bars, "host") <= read.report.prefill_s + 1e-9


def test_a_chrome_trace_holds_every_bar_in_microseconds():
    events = json.loads(chrome_trace(pipeline(4, 0.5, 0.25, 0.01)))["traceEvents"]
    bars = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["name"] for event in events if event["name"] == "thread_name"} == {
        "host",
        "link",
        "worker",
    }
    assert [e["dur"] for e in bars if e["cat"] == "worker"] == pytest.approx([250_000] * 3)
    assert [e["name"] for e in bars if e["tid"] == 1 and e["name"].startswith("head")] == [
        f"head {i}" for i in range(4)
    ]


def test_pictures_show_all_lanes_and_the_title():
    read = pipeline(8, 0.5, 0.5, 0.05)
    picture = ElementTree.fromstring(svg_of(read))
    words = "".join(picture.itertext())
    assert picture.tag.endswith("svg") and all(lane in words for lane in ("host", "link", "worker"))
    page = html_of(read)
    assert title_of(read) in page and page.count("<tr>") == 9 and "worker: busy 3.500 s" in page


def test_a_read_on_the_host_alone_is_drawn_too():
    assert "not split: absent" in svg_of(alone()) and all(
        b.what == "whole" for b in bars_of(alone().report.stages)
    )


def test_the_file_keeps_the_newest_reads_and_goes_on_counting(tmp_path):
    kept = ReadLog(tmp_path, "smol", 30)
    for _ in range(2 * KEPT + 5):
        kept.add(alone().report)
    reads = load_reads(tmp_path / FILE_NAME)
    assert [read.number for read in reads] == list(range(KEPT + 1, 2 * KEPT + 6))
    with (tmp_path / FILE_NAME).open("ab") as file:
        file.write(b'{"half a li')
    ReadLog(tmp_path, "smol", 30).add(alone().report)
    assert load_reads(tmp_path / FILE_NAME)[-1].number == 2 * KEPT + 6


def test_a_folder_that_is_gone_costs_nothing(tmp_path):
    ReadLog(tmp_path / "gone", "smol", 30).add(alone().report)
    assert not list(tmp_path.iterdir())


def test_the_command_lists_draws_and_says_what_is_wrong(tmp_path: Path):
    kept = ReadLog(tmp_path, "smol", 30)
    kept.add(alone().report)
    kept.add(pipeline(4, 0.5, 0.25, 0.01).report)
    run = CliRunner().invoke
    where = ["--run-dir", str(tmp_path)]
    assert run(command, ["list", *where]).output.count("read ") == 2
    assert "split at layer 18 of 30" in run(command, where).output
    for suffix in (".svg", ".html", ".json"):
        out = tmp_path / f"read{suffix}"
        assert run(command, ["1", "-o", str(out), *where]).exit_code == 0 and out.stat().st_size > 500
    reads = load_reads(tmp_path / FILE_NAME)
    with pytest.raises(SettingError, match="1 to 2"):
        pick(reads, "7")
    with pytest.raises(SettingError, match=r"\.svg, \.html, \.json"):
        rendered(reads[0], ".png")
    assert isinstance(run(command, ["--run-dir", str(tmp_path / "none")]).exception, SettingError)

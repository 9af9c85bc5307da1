"""Aim: several logs read as one, in the order of time, over rotation and native crashes, nothing twice, nothing lost.

Method: real files, written, renamed and set aside as the supervisor and a new run do.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.launch.log_reader import LogFile, LogReader, processes_logged


def line(second: int, event: str) -> str:
    return json.dumps({"timestamp": f"2026-01-01T00:00:{second:02}Z", "level": "info", "event": event}) + "\n"


def events(lines) -> list[str]:
    return [json.loads(each.text)["event"] if each.text.startswith("{") else each.text for each in lines]


@pytest.fixture
def logs(tmp_path):
    (tmp_path / "mac.log").write_text(line(1, "a") + line(3, "c") + "Fatal Python error\n" + line(5, "e"))
    (tmp_path / "gateway.log").write_text(line(2, "b") + line(4, "d"))
    return tmp_path


def test_lines_come_in_order_and_an_untimed_one_stays_with_its_neighbour(logs):
    assert processes_logged(logs) == ["gateway", "mac"]
    reader = LogReader(logs, ["gateway", "mac"])
    assert events(reader.last(100)) == ["a", "b", "c", "Fatal Python error", "d", "e"]
    reader.close()


@pytest.mark.parametrize("n", [0, 1, 3])
def test_the_last_lines_of_all(logs, n):
    reader = LogReader(logs, ["gateway", "mac"])
    assert events(reader.last(n)) == ["a", "b", "c", "Fatal Python error", "d", "e"][6 - n :]
    reader.close()


def test_following_over_a_rotation(logs):
    reader = LogReader(logs, ["mac"])
    reader.last(0)
    path = logs / "mac.log"
    with path.open("a") as old:
        old.write(line(6, "f"))
        path.rename(logs / "mac.log.1")
        old.write(line(7, "g"))
    path.write_text(line(8, "h"))
    assert events(reader.new()) == ["f", "g", "h"]
    assert reader.new() == []
    reader.close()


def test_half_a_line_waits_for_its_other_half(logs):
    reader = LogReader(logs, ["gateway"])
    reader.last(1)
    whole = line(9, "whole")
    with (logs / "gateway.log").open("a") as file:
        file.write(whole[:20])
        file.flush()
        assert reader.new() == []
        file.write(whole[20:])
    assert events(reader.new()) == ["whole"]
    reader.close()


def test_a_log_that_appears_later_is_read_from_its_beginning(tmp_path):
    reader = LogReader(tmp_path, ["bridge"])
    assert reader.last(10) == []
    (tmp_path / "bridge.log").write_text(line(1, "first"))
    assert events(reader.new()) == ["first"]
    reader.close()


@given(n_lines=st.integers(1, 200), wanted=st.integers(0, 220), width=st.integers(1, 2000))
def test_the_end_of_a_long_log_is_found_in_blocks(tmp_path_factory, n_lines, wanted, width):
    folder = tmp_path_factory.mktemp("log")
    (folder / "mac.log").write_text("".join(f"{number} {'x' * width}\n" for number in range(n_lines)))
    file = LogFile(folder, "mac")
    found = [int(each.text.split()[0]) for each in file.last(wanted)]
    file.close()
    assert found == list(range(n_lines))[max(0, n_lines - wanted) :] if wanted else found == []

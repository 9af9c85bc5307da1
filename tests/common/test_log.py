"""Aim: every event is one line that a machine can read, carries its process and request, and never a user's text.

Method: log into a string and read the lines back.
"""

from __future__ import annotations

import io
import json
import os

import pytest
import structlog

from common.log import TEXT_MAX, bound, configure_log, get_log


@pytest.fixture(autouse=True)
def afterwards_unconfigured():
    yield
    structlog.reset_defaults()


def logged(*, level="info", format="json"):
    stream = io.StringIO()
    configure_log("mac", level=level, format=format, stream=stream)
    return stream


def lines(stream) -> list[dict]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_an_event_is_one_json_line_with_process_level_and_time():
    stream = logged()
    get_log().info("read finished", tokens=3, detail="two\nlines")
    (line,) = lines(stream)
    assert (line["event"], line["process"], line["level"], line["tokens"]) == (
        "read finished",
        "mac",
        "info",
        3,
    )
    assert line["timestamp"].endswith("Z")


def test_a_request_id_is_bound_to_what_happens_inside():
    stream = logged()
    with bound(request_id="r1"):
        get_log().info("inside")
    get_log().info("outside")
    assert [line.get("request_id") for line in lines(stream)] == ["r1", None]


def test_a_logger_made_before_configuration_follows_it():
    log = get_log(part="early")
    stream = logged()
    log.warning("late")
    assert lines(stream)[0]["part"] == "early"


def test_less_important_events_are_left_out():
    stream = logged(level="warning")
    get_log().info("no")
    get_log().error("yes")
    assert [line["event"] for line in lines(stream)] == ["yes"]


@pytest.mark.parametrize("format", ["json", "text"])
def test_what_users_wrote_and_secrets_are_never_logged(format):
    stream = logged(format=format)
    get_log().info("request", prompt="my diary", messages=["my diary"], api_key="my diary")
    assert "my diary" not in stream.getvalue()
    assert stream.getvalue().count("<not logged>") == 3


def test_an_endless_value_is_cut_and_says_so():
    stream = logged()
    get_log().info("event", detail="x" * 1_000_000)
    assert lines(stream)[0]["detail"].endswith("... (1000000 characters)")
    assert len(stream.getvalue()) < TEXT_MAX + 300


def test_an_exception_keeps_its_trace():
    stream = logged()
    try:
        raise ValueError("broken")
    except ValueError:
        get_log().exception("task failed")
    assert "ValueError: broken" in lines(stream)[0]["exception"]


def test_people_get_a_plain_line():
    stream = logged(format="text")
    get_log().info("read finished", tokens=3)
    assert "read finished" in stream.getvalue()
    assert "tokens=3" in stream.getvalue()
    assert "\x1b" not in stream.getvalue()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="this system has no /dev/full")
def test_a_full_disk_loses_lines_and_ends_nobody():
    with open("/dev/full", "w", buffering=1) as stream:
        configure_log("mac", format="json", stream=stream)
        get_log().info("read finished")
        with pytest.raises(OSError):
            stream.write("what the log tried\n")
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())

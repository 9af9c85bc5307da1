"""Aim: a fault script means what it says or is refused with the words that are allowed.

Method: examples, and a property: what is printed reads back.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import SettingError
from common.wire.frames import ATTENTION, RESIDUAL
from device.emulator.faults import (
    ALL_FRAMES,
    FLIP_MOMENTS,
    FRAMES,
    KINDS,
    MOMENTS,
    PAGE_FRAMES,
    Fault,
    parse_script,
    read_script,
)


def test_a_script_is_read_in_its_order_with_comments_and_both_separators() -> None:
    script = """cut in chunk 3  # the middle

    freeze 8 during range; slow 4 for 10s after chunk
    restart 1 at 2.5s; flip answering sync 2"""
    assert [str(fault) for fault in parse_script(script)] == [
        "cut in chunk 3",
        "freeze 8 during range 1",
        "slow 4 for 10 after chunk 1",
        "restart 1 at 2.5s",
        "flip answering sync 2",
    ]
    assert parse_script("cut now")[0] == Fault("cut", None, None, "at")
    assert parse_script(" # nothing\n;") == []


faults = st.sampled_from(sorted(KINDS)).flatmap(
    lambda kind: st.builds(
        Fault,
        st.just(kind),
        st.just(None) if KINDS[kind].value is None else st.integers(1, 900).map(float),
        st.one_of(st.none(), st.integers(0, 900).map(float)) if KINDS[kind].lasts else st.none(),
        st.sampled_from(FLIP_MOMENTS if kind == "flip" else [*MOMENTS, "at"]),
        st.sampled_from([frame for frame in ALL_FRAMES if frame != "ping"]),
        st.integers(1, 1000),
        st.just(2.5),
    )
)


@given(st.lists(faults, max_size=5))
def test_what_is_printed_reads_back(written: list[Fault]) -> None:
    read = parse_script("\n".join(map(str, written)))
    assert [str(fault) for fault in read] == [str(fault) for fault in written]


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("explode now", "there is no 'explode'; there are cut, freeze"),
        ("cut", "a fault is KIND"),
        ("cut in chunk three", "a fault is KIND"),
        ("cut inside chunk 3", "'inside' is not one of before, in, during"),
        ("cut in tensor 3", "'tensor' is not one of chunk, sync"),
        ("cut 3 now", "cut takes no number"),
        ("freeze now", "freeze needs its seconds"),
        ("freeze 9999 now", "out of range, allowed 0 to 3600"),
        ("slow 0.5 now", "out of range, allowed 1 to 1000"),
        ("cut for 3 now", "cut does not last"),
        ("flip now", "flip needs a frame"),
        ("flip after chunk", "a bit is flipped in or answering a frame"),
        ("flip in ping", "a ping has no hash"),
        ("cut in chunk 0", "0 is out of range, allowed 1"),
        ("cut now; cut now; cut nevr", "fault 3, 'cut nevr'"),
    ],
)
def test_a_bad_script_is_refused_with_what_is_allowed(script: str, says: str) -> None:
    with pytest.raises(SettingError) as caught:
        parse_script(script)
    assert says in str(caught.value)


def test_a_script_may_lie_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "script").write_text("cut now\n")
    assert read_script(f"@{tmp_path / 'script'}") == parse_script("cut now")
    with pytest.raises(SettingError, match="cannot read the script"):
        read_script(f"@{tmp_path / 'none'}")


def test_frames_are_those_of_the_protocol() -> None:
    for words, channel in ((FRAMES, RESIDUAL), (PAGE_FRAMES, ATTENTION)):
        for names in words.values():
            assert set(names) <= set(channel.types)

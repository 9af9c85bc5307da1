"""Aim: docs/emulator.md says of links and faults what the code does. Method: its tables are read and compared."""

from __future__ import annotations

import re
from pathlib import Path

from device.emulator.faults import ALL_FRAMES, KINDS, MOMENTS
from device.emulator.profiles import PROFILES

DOCUMENT = (Path(__file__).parents[2] / "docs" / "emulator.md").read_text(encoding="utf-8")


def table(name: str) -> list[list[str]]:
    """Rows of the table after the comment `contract: name`, without its head."""
    after = DOCUMENT.split(f"<!-- contract: {name} -->\n", 1)[1]
    lines = after.split("\n\n", 1)[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def number(text: str, unit: str) -> float:
    """The number before `unit` in a cell; 0 when the machine's own is meant."""
    found = re.search(rf"([\d,]+) {unit}", text)
    return float(found[1].replace(",", "")) if found else 0.0


def test_links_are_those_of_the_code() -> None:
    rows = table("profiles")
    assert [row[0] for row in rows] == list(PROFILES)
    for name, rate, round_trip, jitter in rows:
        profile = PROFILES[name]
        told = (number(rate, "MB/s"), number(round_trip, "µs"), number(jitter, "µs"))
        assert told == (profile.bytes_per_s / 1e6, profile.round_trip_s * 1e6, profile.jitter_s * 1e6)


def test_kinds_and_moments_are_those_of_the_code() -> None:
    assert table("kinds") == [[name, kind.value or "", kind.text] for name, kind in KINDS.items()]
    assert table("moments") == [list(item) for item in MOMENTS.items()]


def test_every_frame_word_and_every_lasting_kind_is_told() -> None:
    assert all(f"`{frame}`" in DOCUMENT for frame in ALL_FRAMES)
    lasting = ", ".join(f"`{name}`" for name, kind in KINDS.items() if kind.lasts)
    first, _, last = lasting.rpartition(", ")
    assert f"{first} and {last} may last" in DOCUMENT

"""What is said when two fingerprint texts differ: the first differing line, from both sides, bounded, on one line."""

from __future__ import annotations

import pytest

from common.wire.fingerprint import difference, fingerprint


@pytest.mark.parametrize(
    ("host", "worker", "quoted"),
    [
        ("a\nb\nc", "a\nx\nc", ("'b'", "'x'", "line 2")),
        ("a\nb", "a", ("'b'", "'nothing'", "line 2")),
        ("", "a", ("'nothing'", "'a'", "line 1")),
    ],
)
def test_the_first_difference_is_named_from_both_sides(host, worker, quoted):
    text = difference(host, worker)
    assert all(piece in text for piece in quoted)
    assert "outrigger split" in text and "\n" not in text


def test_endless_lines_are_cut():
    assert len(difference("a" * 10_000, "b" * 10_000)) < 800


def test_the_fingerprint_is_of_the_text():
    assert len(fingerprint("a")) == 32
    assert fingerprint("a") != fingerprint("b")

"""Progress lines: none for what is quick, few for what is long. The clock is set by hand."""

from __future__ import annotations

import pytest

from services.cli.progress import ByteProgress


class Clock:
    """Stands in for time.monotonic."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("services.cli.progress.time.monotonic", clock)
    return clock


def test_nothing_is_said_about_quick_work(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ByteProgress("writing x") as progress:
        for done in range(10):
            clock.now_s += 0.15
            progress(done, 10)
    assert capsys.readouterr().err == ""


def test_a_log_gets_a_line_now_and_then(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ByteProgress("writing x") as progress:
        for second in range(1, 21):
            clock.now_s += 1
            progress(second * 1_000_000, 20_000_000)
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "writing x:  10% of 20 MB, 18 s left"
    assert len(lines) == 4

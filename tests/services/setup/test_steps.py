"""Aim: a step shows that it lives, keeps its output, fails with a remedy, leaves nothing behind when interrupted.

Method: real children (this Python, the shell), a log on disk, progress written to a string.
"""

from __future__ import annotations

import io
import os
import sys
import threading
from pathlib import Path

import pytest

from services.setup import steps
from services.setup.checks import SetupError


def progress() -> steps.Progress:
    begun = steps.Progress(1, out=io.StringIO())
    begun.begin("step")
    return begun


def test_all_output_is_in_the_log(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", "import sys; print('to out'); print('to err', file=sys.stderr)"]
    steps.run(command, progress(), log)
    steps.run(command, progress(), log)
    text = log.read_text()
    assert text.count("to out\n") == 2
    assert text.count("to err\n") == 2


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        ("ERROR: Temporary failure in name resolution", "check the network"),
        ("ERROR: No matching distribution found for x", "the package index has no fitting version"),
        ("c++: fatal error: Killed signal terminated program cc1plus", "CMAKE_BUILD_PARALLEL_LEVEL=1"),
        ("OSError: [Errno 28] No space left on device", "the disk is full"),
        ("something new", "see the log"),
    ],
)
def test_a_failure_shows_the_end_of_the_output_and_a_remedy(tmp_path: Path, said: str, remedy: str) -> None:
    log = tmp_path / "log"
    with pytest.raises(SetupError) as caught:
        steps.run(["sh", "-c", f"echo '{said}'; exit 3"], progress(), log)
    text = str(caught.value)
    assert "exit code 3" in text
    assert said in text
    assert remedy in text
    assert str(log) in text


def test_an_error_far_above_the_end_is_shown_too(tmp_path: Path) -> None:
    script = "echo 'a.c:1: error: no such thing'; seq 1000; exit 1"
    with pytest.raises(SetupError, match="error: no such thing"):
        steps.run(["sh", "-c", script], progress(), tmp_path / "log")


def test_a_child_that_dies_by_a_signal_is_told_as_such(tmp_path: Path) -> None:
    with pytest.raises(SetupError, match="signal 11"):
        steps.run(["sh", "-c", "kill -SEGV $$"], progress(), tmp_path / "log")


def test_a_line_appears_now_and_then_where_there_is_no_terminal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "LINE_EVERY_S", 0.0)
    out = io.StringIO()
    watched = steps.Progress(3, out=out)
    watched.begin("compiling")
    steps.run(["sh", "-c", "echo '[7/193] /usr/bin/cc -c a.c'; sleep 0.1; echo x"], watched, tmp_path / "log")
    assert "[1/3] compiling  0:00  compiled 7 of 193 files" in out.getvalue()
    assert "\r" not in out.getvalue()


def test_an_interrupt_ends_the_child_and_its_children(tmp_path: Path) -> None:
    pid_file = tmp_path / "pid"
    script = f"sleep 1000 & echo $! > {pid_file}; wait"

    class Interrupted(steps.Progress):
        def tick(self, doing: str) -> None:
            if pid_file.exists() and pid_file.read_text().strip():
                raise KeyboardInterrupt

    watched = Interrupted(1, out=io.StringIO())
    watched.begin("step")
    with pytest.raises(KeyboardInterrupt):
        steps.run(["sh", "-c", script], watched, tmp_path / "log")
    assert gone(int(pid_file.read_text()))


def gone(pid: int) -> bool:
    """Whether the process has ended; waits for the kernel, and for pytest-timeout if it never ends."""
    while True:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat")
            if state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] == "Z":
                return True  # ended; only its parent has not asked how
        except ProcessLookupError:
            return True
        threading.Event().wait(0.02)


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (61.9, "1:01"), (600, "10:00")])
def test_elapsed_time_is_minutes_and_seconds(seconds: float, text: str) -> None:
    assert steps.clock(seconds) == text


def test_a_short_step_does_not_boast_with_its_time() -> None:
    out = io.StringIO()
    short = steps.Progress(1, out=out)
    short.begin("step")
    short.done()
    assert out.getvalue() == "[1/1] step: done\n"

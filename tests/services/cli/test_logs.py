"""Aim: log lines read well, each process's name beside its words, and a wrong name is told with the right ones.

Method: lines in, text out; the command as a process on real log files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from services.cli.logs import line_text
from services.launch.log_reader import LogLine


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (
            '{"timestamp": "2026-01-01T10:20:30.123456Z", "level": "info", "process": "mac", "event": "model loaded", '
            '"model": "tiny", "note": "two words", "n": 3, "empty": ""}',
            "10:20:30.123  mac         info     model loaded  model=tiny note='two words' n=3 empty=''",
        ),
        ('{"event": "bare"}', "              mac                  bare"),
        ("Fatal Python error: x", "              mac                  Fatal Python error: x"),
    ],
)
def test_a_line_for_people(text, shown):
    assert line_text(LogLine("mac", "", text)) == shown


def logs(run_dir, *arguments: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "OUTRIGGER_RUN_DIR": str(run_dir), "OUTRIGGER_CONFIG": ""}
    command = [sys.executable, "-m", "services.cli.main", "logs", *arguments]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60)


def test_one_process_the_last_lines_and_raw(tmp_path):
    (tmp_path / "mac.log").write_text(json.dumps({"event": "a"}) + "\n" + json.dumps({"event": "b"}) + "\n")
    (tmp_path / "gateway.log").write_text("words\n")
    assert logs(tmp_path, "mac", "-n", "1", "--raw").stdout == '{"event": "b"}\n'
    assert len(logs(tmp_path).stdout.splitlines()) == 3
    wrong = logs(tmp_path, "mack")
    assert wrong.returncode == 2
    assert "no log of 'mack'" in wrong.stderr and "gateway, mac" in wrong.stderr

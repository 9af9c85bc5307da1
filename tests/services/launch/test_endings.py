"""Aim: why a process ended is one sentence: the signal, the place of a native crash, what was running, its own words.

Method: logs and notes as processes leave them, and ends as waitpid tells them; one real crash for faulthandler's form.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from common.crash_note import CrashNote
from services.launch.endings import crash_place, lines_of_life, why_ended
from services.launch.ends import End, EndReader, append_end
from services.launch.logs import log_path


def begins(pid: int) -> str:
    return json.dumps({"event": "process starting", "level": "info", "pid": pid}) + "\n"


def test_a_real_native_crash_names_its_place(tmp_path):
    code = "import faulthandler, ctypes\nfaulthandler.enable()\ndef compute():\n    ctypes.string_at(0)\ncompute()"
    with log_path(tmp_path, "mac").open("wb") as log:
        log.write(begins(7).encode())
        log.flush()
        status = subprocess.run([sys.executable, "-c", code], stderr=log, check=False).returncode
    CrashNote(tmp_path, "mac", 7).slot().write("reading r1, 256 of 1024 tokens done")
    why = why_ended(tmp_path, End.of("mac", 7, -status))
    assert why.startswith("crashed with SIGSEGV in ")
    assert why.endswith(", while reading r1, 256 of 1024 tokens done")


def test_the_crashed_thread_counts_not_the_first_one():
    lines = [
        "Fatal Python error: Aborted",
        "Thread 0x1 (most recent call first):",
        '  File "/x/selectors.py", line 1 in select',
        "Current thread 0x2 (most recent call first):",
        '  File "/x/backend.py", line 118 in compute',
        '  File "/x/span.py", line 7 in run',
    ]
    assert crash_place(lines) == " in compute (backend.py, line 118)"
    assert crash_place(["no crash"]) == ""


@pytest.mark.parametrize(
    ("log", "code", "signal", "why"),
    [
        ("mac: a.gguf: not a model\n", 1, "", "a.gguf: not a model (exit code 1)"),
        ("", 3, "", "it ended without a word (exit code 3)"),
        ("", 0, "", "it was told to stop by somebody else"),
        ("", -1, "SIGKILL", "killed by SIGKILL (by hand, or because memory was short)"),
        ("", -1, "SIGBUS", "crashed with SIGBUS"),
    ],
)
def test_other_ends(tmp_path, log, code, signal, why):
    log_path(tmp_path, "mac").write_text(begins(7) + log)
    assert why_ended(tmp_path, End("mac", 7, code, signal, 0.0)) == why


def test_what_we_ended_ourselves_says_so(tmp_path):
    CrashNote(tmp_path, "mac", 7).slot().write("writing r1")
    end = End("mac", 7, -1, "SIGKILL", 0.0)
    assert (
        why_ended(tmp_path, end, "no turn for 9 s") == "ended by outrigger: no turn for 9 s, while writing r1"
    )


def test_only_the_lines_of_the_life_in_question_count():
    lines = [*begins(1).splitlines(), "mac: first", *begins(2).splitlines(), "mac: second"]
    assert lines_of_life(lines, 1)[-1] == "mac: first"
    assert lines_of_life(lines, 2)[-1] == "mac: second"
    assert lines_of_life([*lines, "ImportError: x"], 3) == ["ImportError: x"]
    assert lines_of_life(["a", "b"], 9) == ["a", "b"]


def test_ends_are_read_once_and_whole(tmp_path):
    reader = EndReader(tmp_path)
    assert reader.read() == []
    append_end(tmp_path, End.of("mac", 7, 11))
    append_end(tmp_path, End.of("mac", 8, 3 << 8))
    first, second = reader.read()
    assert (first.signal, first.code) == ("SIGSEGV", -1)
    assert (second.signal, second.code) == ("", 3)
    with (tmp_path / "ends.jsonl").open("a") as file:
        file.write('{"process": "mac"')
    assert reader.read() == []
    assert EndReader(tmp_path).read() == []
    assert not os.path.exists(tmp_path / "ends.jsonl")


def test_an_end_that_finds_no_room_is_lost_and_leaves_no_half_line(tmp_path):
    program = """
import resource, sys
from pathlib import Path
from services.launch.ends import End, append_end
append_end(Path(sys.argv[1]), End.of("mac", 7, 11))
resource.setrlimit(resource.RLIMIT_FSIZE, (120, 120))
append_end(Path(sys.argv[1]), End.of("mac", 8, 11))
append_end(Path(sys.argv[1]), End.of("mac", 9, 11))
"""
    reader = EndReader(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=30
    )
    assert done.returncode == 0, done.stderr
    append_end(tmp_path, End.of("mac", 10, 11))
    assert [end.pid for end in reader.read()] == [7, 10]

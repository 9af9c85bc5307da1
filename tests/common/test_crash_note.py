"""Aim: what a process did in native code can be read after its death; a line too long is cut, never spilled over.

Method: real files; the death is tested with real processes in tests/services/runtime and tests/services/launch.
"""

from __future__ import annotations

import subprocess
import sys

from common.crash_note import SLOT_BYTES, SLOTS, CrashNote, Slot, note_path, read_note, remove_notes


def test_each_thread_has_its_line_and_the_newest_counts(tmp_path):
    note = CrashNote(tmp_path, "mac", 7)
    first, second = note.slot(), note.slot()
    first.write("reads positions 0-255 of a long prompt")
    second.write("tokenizes")
    first.write("decodes")
    assert read_note(tmp_path, "mac", 7) == ["decodes", "tokenizes"]
    second.clear()
    assert read_note(tmp_path, "mac", 7) == ["decodes"]
    assert note_path(tmp_path, "mac", 7).stat().st_mode & 0o077 == 0
    note.remove()
    assert read_note(tmp_path, "mac", 7) == []


def test_a_long_line_is_cut_and_spares_its_neighbour(tmp_path):
    note = CrashNote(tmp_path, "mac", 7)
    first, second = note.slot(), note.slot()
    second.write("unharmed")
    first.write("ä" * SLOT_BYTES)
    assert read_note(tmp_path, "mac", 7)[1] == "unharmed"
    assert len(read_note(tmp_path, "mac", 7)[0].encode()) < SLOT_BYTES + 3


def test_more_threads_than_slots_share_the_last(tmp_path):
    note = CrashNote(tmp_path, "mac", 7)
    for number in range(SLOTS + 3):
        note.slot().write(f"thread {number}")
    assert read_note(tmp_path, "mac", 7)[-1] == f"thread {SLOTS + 2}"
    assert len(read_note(tmp_path, "mac", 7)) == SLOTS


def test_without_a_file_it_costs_nothing_and_old_notes_go(tmp_path):
    Slot().write("nobody reads this")
    CrashNote(tmp_path, "mac", 7).slot().write("old")
    remove_notes(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_without_room_costs_the_note_and_not_the_process(tmp_path):
    program = """
import resource, sys
from pathlib import Path
from common.crash_note import CrashNote
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
note = CrashNote(Path(sys.argv[1]), "mac", 7)
note.slot().write("reads")
print("lives")
"""
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path], capture_output=True, text=True, timeout=30
    )
    assert (done.stdout, done.returncode) == ("lives\n", 0), done.stderr
    assert read_note(tmp_path, "mac", 7) == []

"""Aim: work of our own processes is not blamed on others, and other programs' work is seen.
Method: a real child that computes for a while, counted once as ours and once as somebody else's."""

from __future__ import annotations

import subprocess
import sys

from services.bench.load import LoadMeter

BUSY = "import sys, time\nt = time.process_time()\nwhile time.process_time() - t < 0.4: pass\nprint('x'); sys.stdin.read()"


def share(counted: bool) -> float:
    child = subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        meter = LoadMeter([child.pid] if counted else [])
        child.stdout.readline()
        return meter.others_share()
    finally:
        child.communicate()


def test_the_same_work_counts_for_others_or_for_us():
    assert share(counted=False) > 0.0
    assert 0.0 <= share(counted=True) <= 1.0

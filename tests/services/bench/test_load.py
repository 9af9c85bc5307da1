"""Aim: work of our own processes is not blamed on others, and other programs' work is seen.
Method: one real child computes for a while; two meters watch it, of which one is told that it is ours."""

from __future__ import annotations

import subprocess
import sys

from services.bench.load import LoadMeter

BUSY = """
import sys, time
start = time.process_time()
while time.process_time() - start < 0.4: pass
print("done", flush=True)
sys.stdin.read()
"""


def test_the_same_work_counts_for_others_unless_it_is_ours():
    child = subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        knows, does_not = LoadMeter([child.pid]), LoadMeter([])
        assert child.stdout.readline() == b"done\n"
        as_ours, as_others = knows.others_share(), does_not.others_share()
    finally:
        child.communicate()
    assert 0.0 <= as_ours < as_others <= 1.0


def test_a_process_that_is_gone_is_no_error():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    assert 0.0 <= LoadMeter([child.pid]).others_share() <= 1.0

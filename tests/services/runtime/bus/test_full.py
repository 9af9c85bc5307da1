"""Aim: a peer that dies while more waits than we take in costs its connection, and never our process.

Method: the reading end is a process of its own, because what is tested against is an abort inside libzmq."""

from __future__ import annotations

import subprocess
import sys

CHILD = """
import sys, time
from dataclasses import replace
from pathlib import Path
from common.wire.messages import Beat, StateChanged
from common.wire.routes import LIFE
from services.runtime.bus import BlockingAsker, BlockingOwner
from services.runtime.endpoints import route_endpoint

endpoint = route_endpoint(Path(sys.argv[1]), LIFE)
wide, narrow = replace(LIFE, hwm=20_000), replace(LIFE, hwm=2)
with BlockingAsker(narrow, endpoint, name="mac") as asker:
    with BlockingOwner(wide, endpoint) as owner:
        asker.send(Beat("mac", 1, 0), wait_s=20.0)
        peer = owner.recv(20.0).peer
        for n in range(10_000):
            owner.send(StateChanged("launch", n, "serving", "x" * 300), to=peer)
    time.sleep(4.0)  # two heartbeats, if there were any
    first = asker.recv(5.0).message.pid
    while asker.recv(0.5) is not None:
        pass  # only behind what came does ZeroMQ find the end of the connection
    with BlockingOwner(wide, endpoint) as owner:
        asker.send(Beat("mac", 1, 7), wait_s=20.0)
        print(first, owner.recv(20.0).message.work)
"""


def test_a_full_reader_outlives_its_peer_and_finds_the_next_one(run_dir):
    child = subprocess.run(
        [sys.executable, "-c", CHILD, str(run_dir)], capture_output=True, text=True, timeout=60
    )
    assert (child.returncode, child.stdout.strip()) == (0, "0 7"), child.stderr[-2000:]

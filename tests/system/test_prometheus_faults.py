"""Aim: each alert fires on what it is for, and every panel that a plain load leaves at zero shows its fault.

Method: the watched system is struck, one fault after the other; Prometheus evaluates the alerts' own expressions over
the real series. Three things are shortened, in running_prometheus: `for` (tested by promtool), the window in which
nothing may move (QueueStuck), and the budget of first tokens, which everybody is to set.
"""

from __future__ import annotations

import resource
import sys
import time
from contextlib import contextmanager, suppress

import pytest
import zmq

from monitoring.panels import DASHBOARDS
from tests.journey.system import until

pytestmark = [pytest.mark.system, pytest.mark.timeout(300)]

ON_LINUX = pytest.mark.skipif(
    sys.platform != "linux", reason="only there can a running process be given less room for files"
)
FOUND_DAMAGED = "outrigger_page_hash_mismatch_total + outrigger_journal_damaged_total"
NOT_STRUCK = {
    "Reads given back by a slow worker": "the guard is off here, for a busy machine would set it off; "
    "tests/services/mac/test_pairing.py gives reads back",
    "Quarantine, and answers that were no numbers": "it takes a worker that computes wrongly and sends it well; "
    "tests/services/mac/test_remote_pages.py and `outrigger verify --held` have such workers",
}


def test_a_slow_worker_is_hot_and_hurts(watched):
    watched.chat("sail", n_sentences=98)
    time.sleep(2)  # whatever idle time does with old pages is done: the worker is to be slow in reading alone
    watched.fault("slow 200 now")
    watched.chat("mast", n_sentences=98)
    watched.wait_fires("WorkerHot")
    watched.wait_fires("WorkerHurts")
    watched.fault("slow 1 now")
    until(lambda: "WorkerHot" not in watched.prometheus.firing())


def test_a_frozen_worker_lets_the_queue_stand_and_first_tokens_come_late(watched):
    watched.fault("freeze 10 now")
    with watched.chatting("oar", "anchor", n_sentences=98):
        watched.wait_fires("QueueStuck")
    watched.wait_fires("TimeToFirstTokenOverBudget")
    until(lambda: "QueueStuck" not in watched.prometheus.firing())


def test_a_slow_disk_lets_the_journal_lag(watched):
    with watched.chatting("lagoon"), watched.slow_disk():
        watched.wait_fires("JournalLagging")
    until(lambda: "JournalLagging" not in watched.prometheus.firing())


@contextmanager
def less_room(watched, process):
    """Inside, no file of a process grows beyond 128 KiB: its writes fail as on a full disk."""
    pid = watched.system.pid_of(process)
    before = resource.prlimit(pid, resource.RLIMIT_FSIZE)
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (128 << 10, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_FSIZE, before)


@ON_LINUX
def test_a_full_disk_is_told_and_what_waits_is_kept_later(watched):
    with watched.chatting("reef"), less_room(watched, "broker"):
        watched.wait_fires("JournalRefuses")


@ON_LINUX
def test_a_page_program_that_cannot_be_written_is_told(watched):
    watched.wait_whole()
    with less_room(watched, "worker"):
        watched.chat("cove")
        until(lambda: watched.value("outrigger_frozen_failed_pages") > 0)


def test_a_damaged_frame_and_a_lost_worker_are_told(watched):
    watched.wait_whole()
    watched.fault("flip answering chunk 1")
    watched.chat("rope")
    watched.wait_fires("ChecksumMismatch")
    watched.wait_whole()
    watched.fault("restart 5 now")
    watched.wait_fires("WorkerLost")
    until(lambda: "WorkerLost" not in watched.prometheus.firing(), 60.0)


def test_a_worker_that_fails_while_it_holds_pages_is_told(watched):
    watched.wait_whole()
    watched.chat("keel")
    until(lambda: watched.value('outrigger_held_pages{where="worker"}') > 0)
    watched.fault("cut in query 1")
    watched.chat("keel", then="Was it?")
    until(lambda: watched.most("sum(rate(outrigger_pages_repushed_total[5m]))") > 0)
    watched.fault("flip in append 1")
    watched.chat("hull")
    until(lambda: watched.value("outrigger_page_hash_mismatch_total") > 0)


def test_a_process_that_does_not_answer_is_told(watched):
    with watched.stopped("bridge"):
        watched.wait_fires("OutriggerProcessDown")
    until(lambda: "OutriggerProcessDown" not in watched.prometheus.firing())


def test_a_broker_that_was_killed_finds_the_conversation_again(watched):
    watched.wait_whole()
    watched.kill("broker")
    watched.chat("hull", then="Was it?")
    until(lambda: watched.value("outrigger_journal_recoveries_total") > 0)


def test_a_stranger_on_the_bus_is_told(watched):
    with zmq.Context() as context, context.socket(zmq.DEALER) as stranger:
        stranger.connect(f"ipc://{watched.system.run_dir}/hold.sock")
        stranger.send(b"good day")
        until(lambda: watched.value('outrigger_bus_dropped_total{reason="foreign"}') > 0)


def test_pages_that_rot_on_the_disk_are_noticed_and_no_worker_is_blamed(watched):
    """The host has mapped them; now its own computation would be another one."""
    told = watched.chat("shore", then="Was it?")["choices"]
    quarantines = watched.value("outrigger_pages_quarantines_total")
    found = watched.value(FOUND_DAMAGED)
    for path in watched.journal.glob("*.journal"):
        with suppress(FileNotFoundError), path.open("r+b") as file:  # an old state's file may go meanwhile
            n_bytes = file.seek(0, 2)
            for offset in range(0, n_bytes, 64):
                file.seek(offset + 1)
                file.write(b"\x40")
    assert watched.chat("shore", then="Was it?")["choices"] == told
    until(lambda: watched.value(FOUND_DAMAGED) > found, 60.0)
    assert watched.value("outrigger_pages_quarantines_total") == quarantines


def test_every_panel_showed_something_by_now(watched):
    time.sleep(2.5)  # two scrapes
    zero = {
        panel.title
        for board in DASHBOARDS
        for panel in board.panels
        if all(watched.most(expression) <= 0 for expression, _legend in panel.queries)
    }
    assert zero <= set(NOT_STRUCK)

"""Aim: a measurement's processes start as told, are missed when they die, and never outlive it.
Method: a small real child process (Python's own module runner) instead of a service."""

from __future__ import annotations

import os

import pytest

from common.config import load_settings
from common.errors import ServiceError
from services.bench.processes import Processes, cores, free_port

SLEEPER = "http.server"  # serves until it is ended


def settings_for(processes):
    return load_settings(None, {}, {"run_dir": str(processes.run_dir("a"))})


def test_children_are_pinned_and_end_with_the_context(monkeypatch):
    with Processes() as processes:
        monkeypatch.chdir(processes.folder)
        core = cores()[-1] if cores() else None
        processes.start("child", SLEEPER, settings_for(processes), core)
        pid = processes._children["child"].pid
        processes.check()
        if core is not None:
            assert os.sched_getaffinity(pid) == {core}
        folder = processes.folder
        assert (folder / "a").stat().st_mode & 0o777 == 0o700
    assert not folder.exists()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_a_child_that_dies_is_told_with_its_last_words():
    with Processes() as processes:
        processes.start("child", "no_such_module", settings_for(processes))
        with pytest.raises(ServiceError, match=r"(?s)child ended with status 1.*no_such_module"):
            processes.wait_until("never", lambda: False, timeout_s=30)


def test_waiting_in_vain_says_for_what():
    with Processes() as processes, pytest.raises(ServiceError, match="for a miracle"):
        processes.wait_until("a miracle", lambda: False, timeout_s=0.1)


def test_free_ports_differ_from_each_other():
    assert len({free_port() for _ in range(5)}) > 1

"""Aim: no bytes make the link's ends raise anything but the protocol's own error, and a running worker survives them.

Method: hypothesis and seeded hostile frames against the codec; the same frames against a real worker; and a far end
that breaks the rules on purpose, which the counting must notice.
"""

from __future__ import annotations

import importlib.util
import socket
import subprocess
import sys
import threading
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common.model.spec import ModelSpec
from common.wire import extension_frames as ext
from common.wire.frames import ATTENTION, RESIDUAL, encode
from common.wire.link import Role
from services.bench.fuzz import live
from services.bench.fuzz.codec import EPOCH, feed, fuzz_codec, greeted_page_link
from services.bench.fuzz.control import fuzz_control
from services.bench.fuzz.frames import stamped
from services.bench.fuzz.live import Footprint, LiveCounts, fuzz_link
from services.bench.fuzz.pages import fuzz_pages
from tests.device.conftest import cases  # noqa: F401  (the tiny models)
from tests.device.worker_process import CHECKOUT, worker_process

roles = st.sampled_from(Role)


@given(roles, st.binary(max_size=400), st.integers(1, 64))
def test_any_bytes_end_a_link_or_mean_nothing(role: Role, stream: bytes, cut: int) -> None:
    assert set(feed(role, stream, cut)) <= {"ended", "arrived", "dropped", "refused"}


@settings(max_examples=300)
@given(roles, st.sampled_from(sorted(RESIDUAL.types.values())), st.binary(max_size=200))
def test_any_body_under_a_right_hash_is_taken_or_ends_the_link(role: Role, kind: int, body: bytes) -> None:
    outcomes = feed(role, stamped(kind, EPOCH, 1, body), 1 << 20)
    assert outcomes["arrived"] + outcomes["ended"] + outcomes["dropped"] + outcomes["refused"] <= 1


def test_a_seeded_run_about_pages_meets_every_outcome() -> None:
    counts = fuzz_codec(seed=4, n_frames=1500, pages=True)
    assert counts.frames >= 1500
    for name in ("arrived", "ended", "dropped", "refused"):
        assert counts.outcomes[name] > 0, name


@given(roles, st.binary(max_size=400), st.integers(1, 64))
def test_any_bytes_end_a_link_of_pages_or_mean_nothing(role: Role, stream: bytes, cut: int) -> None:
    assert set(feed(role, stream, cut, greeted_page_link)) <= {"ended", "arrived", "dropped", "refused"}


@settings(max_examples=300)
@given(roles, st.sampled_from(sorted(ATTENTION.types.values())), st.binary(max_size=200))
def test_any_body_about_pages_is_taken_or_ends_the_link(role: Role, kind: int, body: bytes) -> None:
    outcomes = feed(role, stamped(kind, EPOCH, 1, body, ATTENTION), 1 << 20, greeted_page_link)
    assert outcomes["arrived"] + outcomes["ended"] + outcomes["dropped"] + outcomes["refused"] <= 1


def test_a_seeded_run_meets_every_outcome() -> None:
    counts = fuzz_codec(seed=3, n_frames=1500)
    assert counts.frames >= 1500
    for name in ("arrived", "ended", "dropped", "refused", "rows", "rows refused"):
        assert counts.outcomes[name] > 0, name


@pytest.fixture(scope="module")
def worker(cases):  # noqa: F811
    with worker_process(cases["qwen35"].tail) as process:
        yield process


def test_a_worker_survives_hostile_hosts_and_serves_honest_ones(cases, worker) -> None:  # noqa: F811
    spec = ModelSpec.read(cases["qwen35"].tail)
    fuzz_link(worker.link, spec, seed=1, n_frames=100)
    before = Footprint.of(worker.process.pid)
    counts = fuzz_link(worker.link, spec, seed=5, n_frames=700)
    fuzz_control(worker.control, seed=5, n_lines=120, counts=counts)
    assert counts.problems == []
    assert counts.errors_a_connection_max == 1
    assert counts.outcomes["honest hosts"] >= 1
    assert counts.outcomes["err2"] > 50 and counts.outcomes["error"] > 10
    assert counts.control_lines == 120
    assert worker.process.poll() is None
    assert Footprint.of(worker.process.pid).rss_bytes - before.rss_bytes < 96 << 20


def test_a_worker_survives_hostile_hosts_of_pages(worker) -> None:
    fuzz_pages(worker.pages, seed=2, n_frames=100)
    before = Footprint.of(worker.process.pid)
    counts = fuzz_pages(worker.pages, seed=6, n_frames=1000)
    assert counts.problems == []
    assert counts.errors_a_connection_max == 1 and counts.outcomes["honest hosts"] >= 1
    for answer in ("attn2_ok", "ok2", "config2_ok", "err2", "error"):
        assert counts.outcomes[answer] > 0, answer
    assert worker.process.poll() is None
    assert Footprint.of(worker.process.pid).rss_bytes - before.rss_bytes < 96 << 20


def test_a_far_end_that_breaks_the_rules_is_noticed(cases, monkeypatch) -> None:  # noqa: F811
    """It answers everything with two errors and keeps the connection: each of that is a problem."""
    monkeypatch.setattr(live, "SILENCE_S_MAX", 0.3)
    spec = ModelSpec.read(cases["llama"].tail)
    complaint = b"".join(encode(RESIDUAL, ext.Err2.of(0, 502, 0, "no"), epoch=1, seq=1))

    def serve(door: socket.socket) -> None:
        while True:
            try:
                client, _ = door.accept()
            except OSError:
                return
            with client:
                client.recv(65536)
                client.sendall(complaint + complaint)

    with socket.create_server(("127.0.0.1", 0)) as door:
        thread = threading.Thread(target=serve, args=(door,))
        thread.start()
        counts = LiveCounts(outcomes=Counter())
        host = live.HostileHost(door.getsockname())
        host.say(live.greeting(spec, 1))
        while host.hear() is not None:
            pass
        host.close()
        assert host.errors == 2
        live._check_honest(door.getsockname(), live.ResidualSubject(spec), counts)
        assert counts.problems == ["an honest host was not served"]
        door.shutdown(socket.SHUT_RDWR)
    thread.join()


@pytest.mark.skipif(importlib.util.find_spec("atheris") is None, reason="needs the extra: outrigger[fuzz]")
def test_the_guided_fuzzer_runs_and_finds_nothing() -> None:
    command = [sys.executable, "-m", "services.bench.fuzz.guided", "2000", "1"]
    done = subprocess.run(command, cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "Done 2000 " in done.stderr

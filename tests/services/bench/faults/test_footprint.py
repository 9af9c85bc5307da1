"""Aim: a leak of descriptors, threads or memory is told, and what merely settles late is not.
Method: footprints of this very process with things opened on purpose."""

from __future__ import annotations

import os
import tempfile
from dataclasses import replace

from services.bench.faults.footprint import (
    DESCRIPTORS_MORE_MAX,
    MEMORY_MORE_BYTES_MAX,
    Footprint,
    footprints,
    leaks,
)

HERE = {"mac": os.getpid()}


def test_descriptors_kept_open_are_a_leak_until_they_are_closed():
    before = footprints(HERE)
    assert leaks(before, lambda: footprints(HERE), settle_s=0) == []
    kept = [tempfile.TemporaryFile() for _ in range(DESCRIPTORS_MORE_MAX + 1)]  # noqa: SIM115
    (told,) = leaks(before, lambda: footprints(HERE), settle_s=0)
    assert told.startswith("mac: ") and "descriptors became" in told

    def look():
        while kept:
            kept.pop().close()
        return footprints(HERE)

    assert leaks(before, look, settle_s=0) == []


def test_threads_and_memory_have_bounds_of_their_own():
    before = Footprint(10, 5, 1 << 30)
    assert before.grown_beyond(before) == []
    assert "threads" in replace(before, n_threads=8).grown_beyond(before)[0]
    assert replace(before, rss_bytes=before.rss_bytes + MEMORY_MORE_BYTES_MAX).grown_beyond(before) == []
    assert "MiB" in replace(before, rss_bytes=2 * before.rss_bytes).grown_beyond(before)[0]

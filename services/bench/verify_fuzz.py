"""`outrigger verify --fuzz`: 100,000 hostile frames and lines: codec, guided fuzzer, and a running worker.

Half of the frames go to the links' state machines in this process, half over loopback to a real worker with a small
model; of each, a third are about pages. A coverage-guided fuzzer adds what it finds, where the extra `fuzz` is there.
Exit 1 when anything crashed, hung, said more than one error on a connection, refused an honest host afterwards, or kept
memory, threads or descriptors. Called by services.cli.verify.
"""

from __future__ import annotations

import importlib.util
import re
import secrets
import subprocess
import sys
import time
from dataclasses import dataclass, field

from common.config import load_settings
from common.limits import MIB
from common.model.geometry import Geometry
from common.model.spec import ModelSpec
from common.model.split import write_tail
from common.model.synthetic import write_synthetic
from services.bench.fuzz.codec import fuzz_codec
from services.bench.fuzz.control import fuzz_control
from services.bench.fuzz.live import Footprint, LiveCounts, fuzz_link
from services.bench.fuzz.pages import fuzz_pages
from services.bench.processes import Processes, free_port
from services.bench.report import Report

FRAMES, FRAMES_QUICK = 100_000, 10_000
CONTROL_LINES, CONTROL_LINES_QUICK = 2_000, 300
GUIDED_RUNS, GUIDED_RUNS_QUICK = 300_000, 20_000
GUIDED_S_MAX = 600.0
GEOMETRY = Geometry(
    arch="qwen35",
    n_layer=8,
    n_embd=64,
    n_ff=96,
    n_head=2,
    n_head_kv=1,
    head_dim=32,
    n_vocab=512,
    state_dim=32,
)
RSS_GROWTH_BYTES_MAX = 96 * MIB
"""A worker keeps a few receive buffers, snapshots and arenas; frames of 256 MiB that were only announced are more."""
SETTLE_S = 10.0
PAGES_PART = 3
"""One of so many frames is about pages."""


@dataclass
class FuzzCounts:
    """What was sent and what came of it. `problems` is empty when all is well."""

    seed: int
    frames: int = 0
    guided_runs: int = 0
    connections: int = 0
    control_lines: int = 0
    honest_hosts: int = 0
    errors_a_connection_max: int = 0
    rss_growth_bytes: int = 0
    problems: list[str] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return not self.problems and self.frames > 0 and self.honest_hosts > 0


def verify_fuzz(report: Report, seed: int | None = None) -> FuzzCounts:
    """Run everything and say so in `report`; the caller decides what a problem means. seed None: a new one, told."""
    counts = FuzzCounts(secrets.randbelow(1 << 31) if seed is None else seed)
    n_frames = FRAMES_QUICK if report.quick else FRAMES
    report.progress(f"seed {counts.seed}")
    _codec(report, counts, n_frames // 2)
    _guided(report, counts)
    _worker(report, counts, n_frames - n_frames // 2)
    report.row(**{name: getattr(counts, name) for name in FuzzCounts.__dataclass_fields__})
    return counts


def _codec(report: Report, counts: FuzzCounts, n_frames: int) -> None:
    try:
        codec = fuzz_codec(counts.seed, n_frames - n_frames // PAGES_PART)
        pages = fuzz_codec(counts.seed, n_frames // PAGES_PART, pages=True)
    except Exception as error:  # whatever it is, it is what we look for
        counts.problems.append(f"the codec raised {type(error).__name__}: {error} (seed {counts.seed})")
        return
    for name, each in (("codec", codec), ("codec of pages", pages)):
        counts.frames += each.frames
        told = ", ".join(f"{n:,} {outcome}" for outcome, n in each.outcomes.most_common())
        report.progress(f"{name}: {each.frames:,} frames: {told}")


def _guided(report: Report, counts: FuzzCounts) -> None:
    if importlib.util.find_spec("atheris") is None:
        report.note("no coverage-guided fuzzing: pip install 'outrigger[fuzz]'")
        return
    runs = GUIDED_RUNS_QUICK if report.quick else GUIDED_RUNS
    command = [sys.executable, "-m", "services.bench.fuzz.guided", str(runs), str(counts.seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=GUIDED_S_MAX, check=False)
    found = re.search(r"^Done (\d+) ", done.stderr, re.M)
    if done.returncode or found is None:
        counts.problems.append(f"the guided fuzzer ended with {done.returncode}: {done.stderr[-1500:]}")
        return
    counts.guided_runs = int(found[1])
    covered = re.findall(r"cov: (\d+)", done.stderr)
    report.progress(
        f"guided: {counts.guided_runs:,} runs, {covered[-1] if covered else '?'} branches reached"
    )


def _worker(report: Report, counts: FuzzCounts, n_frames: int) -> None:
    """A worker of its own, on free ports."""
    with Processes() as processes:
        whole, tail = processes.folder / "fuzz.gguf", processes.folder / "fuzz-tail.gguf"
        write_synthetic(GEOMETRY, whole)
        write_tail(whole, 4, tail)
        link, control, pages = (("127.0.0.1", free_port()) for _ in range(3))
        flags = {
            "tail": str(tail),
            "worker_ctx": 512,
            "worker_threads": 1,
            "log_format": "json",
            "log_level": "error",
        }
        settings = load_settings(
            None,
            {},
            flags
            | {"listen_port": link[1], "listen_control_port": control[1], "listen_pages_port": pages[1]},
        )
        processes.start("worker", "device.worker", settings)
        spec = ModelSpec.read(tail)
        processes.connect("worker", lambda: fuzz_link(link, spec, counts.seed, 1))
        (pid,) = processes.pids
        warm = fuzz_link(link, spec, counts.seed + 1, 500)
        counts.problems += fuzz_pages(pages, counts.seed + 1, 500).problems
        before = Footprint.of(pid)
        live = fuzz_link(link, spec, counts.seed, n_frames - n_frames // PAGES_PART)
        _take_over(counts, fuzz_pages(pages, counts.seed, n_frames // PAGES_PART))
        lines = CONTROL_LINES_QUICK if report.quick else CONTROL_LINES
        fuzz_control(control, counts.seed, lines, live)
        _take_over(counts, live)
        counts.problems += warm.problems
        processes.check()
        _check_footprint(before, pid, counts)
    told = ", ".join(f"{n:,} {name}" for name, n in live.outcomes.most_common(30))
    report.progress(f"worker: {live.frames:,} frames on {live.connections:,} connections: {told}")


def _take_over(counts: FuzzCounts, live: LiveCounts) -> None:
    counts.frames += live.frames
    counts.connections += live.connections
    counts.control_lines += live.control_lines
    counts.honest_hosts += live.outcomes["honest hosts"]
    counts.errors_a_connection_max = max(counts.errors_a_connection_max, live.errors_a_connection_max)
    counts.problems += live.problems


def _check_footprint(before: Footprint, pid: int, counts: FuzzCounts) -> None:
    """What the worker holds once its clients are gone; threads of the last ones get some time to end."""
    until = time.monotonic() + SETTLE_S
    while True:
        after = Footprint.of(pid)
        settled = after.n_threads <= before.n_threads + 1 and after.n_fds <= before.n_fds + 1
        if settled or time.monotonic() > until:
            break
        time.sleep(0.1)
    counts.rss_growth_bytes = after.rss_bytes - before.rss_bytes
    if not settled:
        counts.problems.append(f"the worker kept threads or descriptors: {before} before, {after} after")
    if counts.rss_growth_bytes > RSS_GROWTH_BYTES_MAX:
        counts.problems.append(f"the worker grew by {counts.rss_growth_bytes / MIB:.0f} MiB")

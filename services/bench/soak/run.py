"""A soak from start to report. Called by services.cli.soak."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from typing import Any

import psutil

from common.config import Settings
from common.limits import MIB
from common.model.spec import ModelSpec
from services.bench.drill.past import BY_JOURNAL, BY_WORKER, FELL_BACK, N_FIRST, N_PROMPT, Growth
from services.bench.drill.prompts import prompts
from services.bench.drill.system import LEASE_S, N_CTX_MAX, PAST_THE_LIMIT, Struckable, why_not_past
from services.bench.report import Report
from services.bench.soak.drawing import svg_of
from services.bench.soak.plan import KINDS, Stroke, deeds, strokes
from services.bench.soak.samples import Sample, growth_mib_per_min, not_back, still_growing, take
from services.bench.soak.striking import Striker
from services.bench.soak.traffic import Traffic

N_CLIENTS = 3
SHORT, N_SHORT = (96, 16), 6
LONG, N_LONG = (1000, 16), 4
PAST, N_PAST = (N_PROMPT, 32), 3
JOURNAL_MIB_MIN = 16
SAMPLE_S = 2.0
REST_S = LEASE_S + 5.0
"""After the last request: idle work of the host ends, connections close, clients that left are forgotten."""
SETTLE_S_MAX = 30.0
WHOLE_S_MAX = 120.0
WARM_UP_DEEDS_S = 20.0
"""Traffic and faults before the first look: what processes hold from then on is what they may hold at the end."""


@dataclass
class Soaked:
    """What was seen. `problems` are sentences; empty when all is as it must be."""

    seed: int
    minutes: float
    counts: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    faults_at_s: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)
    pages: Growth = field(default_factory=Growth)
    """What the mac process counted."""
    before: Sample | None = None
    after: Sample | None = None
    problems: list[str] = field(default_factory=list)


def run_soak(model: Path, settings: Settings, report: Report, *, minutes: float, seed: int) -> Soaked:
    """Start everything, ask and strike for `minutes`, look again. Raises ServiceError when it does not start."""
    soaked = Soaked(seed, minutes)
    why_not = why_not_past(settings)
    more: dict[str, Any] = {} if why_not else PAST_THE_LIMIT | {"journal_mib": journal_mib(model)}
    if why_not:
        report.note(f"no conversation past the host's limit: {why_not}")
    with Struckable(model, settings, **more) as system:
        system.wait_whole(WHOLE_S_MAX)
        asked = prompts(model, system.settings, [SHORT] * N_SHORT + [LONG] * N_LONG, report.progress)
        asked += prompts(model, system.settings, [PAST] * N_PAST, report.progress, 0 if why_not else N_FIRST)
        faults = strokes(seed)
        plans = [deeds(seed, client, N_SHORT, N_LONG, N_PAST) for client in range(N_CLIENTS)]
        report.progress("warming up")
        warm = Soaked(seed, 0.0)
        _go(system, Traffic(system, asked, plans), faults, warm, WARM_UP_DEEDS_S, report)
        soaked.problems += warm.problems
        soaked.before = _at_rest(system, 0.0)
        traffic = Traffic(system, asked, plans)
        report.progress(f"{minutes:g} minutes of {N_CLIENTS} clients under faults, seed {seed}")
        seconds = _go(system, traffic, faults, soaked, 60 * minutes, report)
        soaked.counts = traffic.counts
        until_s = time.monotonic() + SETTLE_S_MAX
        soaked.after = _at_rest(system, seconds)
        while (left := _left(system, soaked)) and time.monotonic() < until_s:
            soaked.after = _at_rest(system, seconds)
        soaked.problems += left + still_growing(soaked.samples)
    soaked.problems += [f"left behind once all was stopped: {text}" for text in system.left_behind]
    return soaked


def journal_mib(model: Path) -> int:
    """A cap that a soak may well reach: what three conversations of the longest kind take."""
    spec = ModelSpec.read(model)
    n_layer = sum(kind == "attention" for kind in spec.kinds)
    token_bytes = 2 * 2 * n_layer * spec.n_head_kv * spec.head_dim
    return max(JOURNAL_MIB_MIN, 3 * N_CTX_MAX * token_bytes // MIB)


def _left(system: Struckable, soaked: Soaked) -> list[str]:
    assert soaked.before and soaked.after
    return not_back(soaked.before, soaked.after) + system.not_at_rest()


def _go(
    system: Struckable,
    traffic: Traffic,
    faults: Iterator[Stroke],
    soaked: Soaked,
    seconds: float,
    report: Report,
) -> float:
    """Traffic and faults for so long; samples go to `soaked`. Returns the seconds it took."""
    striker = Striker(system, traffic.excuse)
    began_s = told_s = time.monotonic()
    traffic.start()
    try:
        stroke = next(faults)
        due_s = began_s + stroke.after_s
        while (now := time.monotonic()) < began_s + seconds:
            if now >= due_s:
                striker.strike(stroke)
                stroke = next(faults)
                due_s = now + stroke.after_s
            _sample(system, soaked, now - began_s, report)
            struck = striker.happened()
            soaked.faults.update(
                " ".join(line.split()[: 2 if line.startswith("kill") else 1]) for line in struck
            )
            soaked.faults_at_s += [now - began_s] * len(struck)
            if now - told_s > 30:
                told_s = now
                report.progress(f"{(now - began_s) / 60:.1f} min: {dict(traffic.counts)}")
            time.sleep(
                max(0.0, min(SAMPLE_S, due_s - time.monotonic(), began_s + seconds - time.monotonic()))
            )
    finally:
        traffic.stop()
        striker.close()
    soaked.problems += traffic.problems
    return time.monotonic() - began_s


def _sample(system: Struckable, soaked: Soaked, at_s: float, report: Report) -> None:
    """Look once; a process that is killed under our eyes makes the next look the better one."""
    soaked.pages.look(system.metrics("mac"))
    with suppress(psutil.NoSuchProcess):
        soaked.samples.append(take(system, at_s))
        report.row(seed=soaked.seed, **sample_row(soaked.samples[-1]))


def _at_rest(system: Struckable, at_s: float) -> Sample:
    system.wait_whole(WHOLE_S_MAX)
    time.sleep(REST_S)
    return take(system, at_s)


def sample_row(sample: Sample) -> dict[str, object]:
    """A sample as a flat row of JSON."""
    return {
        "at_s": round(sample.at_s, 2),
        "held": {
            name: {
                "rss_mib": each.rss_bytes // MIB,
                "descriptors": each.n_descriptors,
                "threads": each.n_threads,
            }
            for name, each in sample.held.items()
        },
        "gauges": sample.gauges,
        "journal": {"files": sample.journal.n_files, "bytes": sample.journal.n_bytes},
    }


def tell(report: Report, soaked: Soaked) -> None:
    """The tables and the figures; refuses figures of a run in which nothing was compared or struck."""
    assert soaked.before and soaked.after
    rows = [
        (
            name,
            held.rss_bytes // MIB,
            now.rss_bytes // MIB,
            growth_mib_per_min(soaked.samples, name),
            held.n_descriptors,
            now.n_descriptors,
            held.n_threads,
            now.n_threads,
        )
        for name, held in soaked.before.held.items()
        if (now := soaked.after.held.get(name))
    ]
    report.table(
        f"{soaked.minutes:g} minutes, seed {soaked.seed}: what processes held at rest, before and after",
        ("process", "MiB", "after", "MiB/min", "descriptors", "after", "threads", "after"),
        rows,
    )
    most = max(each.journal.n_bytes for each in soaked.samples)
    report.table("faults that struck", ("fault", "times"), sorted(soaked.faults.items()))
    for problem in soaked.problems:
        report.note(f"problem: {problem}")
    before, after = soaked.before.journal, soaked.after.journal
    report.table(
        "the journal at rest",
        ("", "files", "MiB"),
        [
            ("before", before.n_files, before.n_bytes / MIB),
            ("largest", max(each.journal.n_files for each in soaked.samples), most / MIB),
            ("after", after.n_files, after.n_bytes / MIB),
        ],
    )
    counts, pages = soaked.counts, soaked.pages.by_series
    n_asked = sum(counts[kind] for kind in KINDS)
    n_struck = sum(soaked.faults.values())
    report.figure("minutes", soaked.minutes)
    report.figure("seed", soaked.seed)
    report.figure("requests", n_asked, requests=n_asked)
    report.figure("cancelled", counts["cancel"])
    report.figure("failed", counts["failed"])
    report.figure("asked_again", counts["asked_again"])
    report.figure("kills", sum(n for what, n in soaked.faults.items() if what.startswith("kill")))
    report.figure("faults", n_struck, faults=n_struck)
    report.figure("reads_struck", counts["reads_struck"])
    report.figure("tokens_worker", counts["tokens_worker"], tokens_worker=counts["tokens_worker"])
    report.figure("past_the_limit", counts["past"])
    report.figure("groups_worker", pages.get(BY_WORKER, 0.0))
    report.figure("groups_journal", pages.get(BY_JOURNAL, 0.0))
    report.figure("pages_lost", sum(n for series, n in pages.items() if series.startswith(FELL_BACK)))
    report.figure("compared", counts["compared"], compared=counts["compared"])
    report.figure("equal", counts["equal"])
    report.figure("problems", len(soaked.problems))


def write_page(path: Path, soaked: Soaked, figures: dict[str, object], title: str) -> None:
    """The report as one HTML page (or, by its ending, the plots alone as SVG). Raises SettingError, OSError."""
    svg = svg_of(soaked.samples, soaked.faults_at_s, title)
    if path.suffix == ".svg":
        path.write_text(svg, encoding="utf-8")
        return
    problems = "".join(f"<li>{escape(text)}</li>" for text in soaked.problems) or "<li>none</li>"
    body = escape(json.dumps({**figures, "faults": dict(soaked.faults)}, indent=2))
    path.write_text(
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<h1>{escape(title)}</h1>{svg[svg.index('<svg') :]}"
        f"<h2>Problems</h2><ul>{problems}</ul><pre>{body}</pre></html>\n",
        encoding="utf-8",
    )

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

from common.config import Settings
from common.errors import OutriggerError
from common.limits import MIB
from services.bench.drill.prompts import prompts
from services.bench.drill.system import LEASE_S, Struckable
from services.bench.report import Report
from services.bench.soak.drawing import svg_of
from services.bench.soak.plan import Stroke, deeds, strokes
from services.bench.soak.samples import Sample, growth_mib_per_min, not_back, still_growing, take
from services.bench.soak.traffic import Traffic

N_CLIENTS = 3
SHORT, N_SHORT = (96, 16), 6
LONG, N_LONG = (1100, 16), 4
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
    before: Sample | None = None
    after: Sample | None = None
    problems: list[str] = field(default_factory=list)


def run_soak(model: Path, settings: Settings, report: Report, *, minutes: float, seed: int) -> Soaked:
    """Start everything, ask and strike for `minutes`, look again. Raises ServiceError when it does not start."""
    soaked = Soaked(seed, minutes)
    with Struckable(model, settings) as system:
        system.wait_whole(WHOLE_S_MAX)
        asked = prompts(model, system.settings, [SHORT] * N_SHORT + [LONG] * N_LONG, report.progress)
        faults = strokes(seed)
        plans = [deeds(seed, client, N_SHORT, N_LONG) for client in range(N_CLIENTS)]
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
        while (left := not_back(soaked.before, soaked.after)) and time.monotonic() < until_s:
            soaked.after = _at_rest(system, seconds)
        soaked.problems += left + still_growing(soaked.samples)
    return soaked


def _go(
    system: Struckable,
    traffic: Traffic,
    faults: Iterator[Stroke],
    soaked: Soaked,
    seconds: float,
    report: Report,
) -> float:
    """Traffic and faults for so long; samples go to `soaked`. Returns the seconds it took."""
    end = system.far_end()
    began_s = told_s = time.monotonic()
    traffic.start()
    n_fired = len(end.fired(0)) if end else 0
    try:
        stroke: Stroke = next(faults)
        due_s = began_s + stroke.after_s
        while (now := time.monotonic()) < began_s + seconds:
            if end and now >= due_s:
                end.ask("disarm")  # a fault whose moment did not come makes room
                end.ask(f"fault {stroke.script}")
                stroke = next(faults)
                due_s = now + stroke.after_s
            soaked.samples.append(take(system, now - began_s))
            report.row(seed=soaked.seed, **sample_row(soaked.samples[-1]))
            if end:
                fired = end.fired(n_fired)
                n_fired += len(fired)
                soaked.faults.update(line.split()[0] for line in fired)
                soaked.faults_at_s += [now - began_s] * len(fired)
            if now - told_s > 30:
                told_s = now
                report.progress(f"{(now - began_s) / 60:.1f} min: {dict(traffic.counts)}")
            time.sleep(
                max(0.0, min(SAMPLE_S, due_s - time.monotonic(), began_s + seconds - time.monotonic()))
            )
    finally:
        traffic.stop()
        if end:
            with suppress(OutriggerError):
                end.ask("disarm")
            end.close()
    soaked.problems += traffic.problems
    return time.monotonic() - began_s


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
    report.table("faults that struck", ("fault", "times"), sorted(soaked.faults.items()))
    for problem in soaked.problems:
        report.note(f"problem: {problem}")
    counts = soaked.counts
    n_asked = sum(counts[kind] for kind in ("chat", "read", "cancel", "reconnect"))
    n_struck = sum(soaked.faults.values())
    report.figure("minutes", soaked.minutes)
    report.figure("seed", soaked.seed)
    report.figure("requests", n_asked, requests=n_asked)
    report.figure("cancelled", counts["cancel"])
    report.figure("failed", counts["failed"])
    report.figure("faults", n_struck, faults=n_struck)
    report.figure("reads_struck", counts["reads_struck"])
    report.figure("tokens_worker", counts["tokens_worker"], tokens_worker=counts["tokens_worker"])
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

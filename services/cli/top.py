"""`outrigger top`: what happens now, in rates made from the processes' own /metrics; for whoever has no Prometheus.

Reads each process twice and shows the difference; on a terminal again and again until Ctrl-C, else once.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable

import click

from common.config import find_file, load_settings
from common.config.page_workers import worker_numbers
from services.bench.scrape import scrape
from services.cli.held_view import MB, Samples, facts_of, total
from services.runtime.service import numbered_port

EXIT_NOTHING_RUNS = 3
Grown = Callable[..., float]
Ratio = Callable[[float, float, str], str]
COUNTS = ("_total", "_count", "_sum", "_bucket")
WORKER_STATE = "outrigger_worker_state{state="


@click.command()
@click.option(
    "--every", "every_s", type=click.FloatRange(0.2, 60), default=2.0, help="Seconds between two looks."
)
def command(every_s: float) -> None:
    """Show rates of reading and writing, requests, cable, worker and old pages; on a terminal again and again.

    \b
    Exit codes: 0 shown, 2 a bad setting, 3 no process answers on its metrics port.
    """
    settings = load_settings(find_file(os.environ), os.environ)
    metrics = settings.metrics
    ports = {
        "gateway": metrics.gateway_port,
        "mac": metrics.mac_port,
        "broker": metrics.broker_port,
        "bridge": metrics.bridge_port,
    }
    further = [number for number in worker_numbers(settings) if number]
    ports |= {f"bridge-{number}": numbered_port(metrics.bridge_port, number) for number in further}
    before, began = look(ports), time.monotonic()
    if not before:
        asked = ", ".join(f"{name} {port}" for name, port in ports.items())
        click.echo(f"no process answers for its metrics ({asked}). `outrigger up` starts them.", err=True)
        raise SystemExit(EXIT_NOTHING_RUNS)
    while True:
        time.sleep(every_s)
        after, now = look(ports), time.monotonic()
        text = table(before, after, now - began)
        if not sys.stdout.isatty():
            click.echo(text)
            return
        click.clear()
        click.echo(text)
        before, began = after, now


def look(ports: dict[str, int]) -> Samples:
    """All samples of the processes that answer, counts of several bridges added up; of none: empty."""
    found: Samples = {}
    for port in ports.values():
        try:
            samples = scrape(port) if port else {}
        except OSError:
            continue
        for sample, value in samples.items():
            is_count = sample.partition("{")[0].endswith(COUNTS)
            found[sample] = found.get(sample, 0.0) + value if is_count else found.get(sample, value)
    return found


def table(before: Samples, after: Samples, seconds: float) -> str:
    """One line a fact; "-" where nothing happened between the two looks, or its process does not answer."""

    def grown(series: str, label: str = "") -> float:
        name = f"outrigger_{series}"
        return sum(
            max(0.0, value - before.get(sample, value))  # a process that was started again begins at zero
            for sample, value in after.items()
            if sample.partition("{")[0] == name and label in sample
        )

    def ratio(above: float, below: float, unit: str) -> str:
        return f"{above / below:,.1f} {unit}" if below and above else "-"

    def gauge(series: str) -> str:
        value = after.get(f"outrigger_{series}")
        return "-" if value is None else f"{value:g}"

    lines = {
        "the last": f"{seconds:.1f} s; - where nothing happened in them",
        "requests": f"{gauge('requests_running')} running, {gauge('requests_waiting')} waiting, "
        f"{grown('requests_total'):g} ended",
        "first token": ratio(
            grown("time_to_first_token_seconds_sum"), grown("time_to_first_token_seconds_count"), "s (mean)"
        ),
    }
    for side in ("host", "worker", "together"):
        label = f'side="{side}"'
        lines[f"prefill {side}"] = ratio(
            grown("prefill_tokens_total", label), grown("prefill_seconds_total", label), "tok/s"
        )
    lines["decode"] = ratio(grown("generation_tokens_total"), grown("decode_seconds_total"), "tok/s")
    for direction in ("out", "in"):
        carried = grown("link_bytes_total", f'direction="{direction}"')
        lines[f"cable {direction}"] = ratio(carried / 1e6, seconds, "MB/s")
    lines["round trip"] = ratio(
        1000 * grown("link_rtt_seconds_sum"), grown("link_rtt_seconds_count"), "ms (mean)"
    )
    states = [
        name[len(WORKER_STATE) + 1 : -2] for name, on in after.items() if name.startswith(WORKER_STATE) and on
    ]
    lines["worker"] = (
        f"{', '.join(states) or '-'}, heat {gauge('worker_thermal_state')}, split {gauge('split_layer')}"
    )
    lines["fallbacks"] = f"{grown('worker_fallback_total'):g}"
    if total(after, "journal_bytes") or total(after, "held_pages"):
        lines |= _pages(after, grown, ratio)
    return "\n".join(f"{name:<17}{value}" for name, value in lines.items())


def _pages(after: Samples, grown: Grown, ratio: Ratio) -> dict[str, str]:
    """Lines about old pages; there are none before the first page is kept."""
    facts, tokens = facts_of(after), facts_of(after)["tokens"]
    by_worker, groups = grown("held_groups_total", 'where="worker"'), grown("held_groups_total")
    return {
        "old pages": f"{tokens['journal']:,} tokens kept, {tokens['journal_only']:,} of them out of memory, "
        f"{tokens['worker']:,} on the worker",
        "journal": f"{facts['journal_bytes'] / MB:,.1f} MB, {facts['journal_lag_pages']} pages wait, "
        f"oldest {facts['journal_lag_s']:.1f} s, {grown('journal_failures_total'):g} failed",
        "page query": ratio(
            1000 * grown("held_query_seconds_sum"), grown("held_query_seconds_count"), "ms (mean)"
        ),
        "by the worker": ratio(100 * by_worker, groups, "% of groups"),
        "page program": ratio(
            1000 * grown("frozen_page_seconds_sum"), grown("frozen_page_seconds_count"), "ms (mean)"
        ),
        "page faults": f"{grown('pages_fallback_total'):g} fallbacks, "
        f"{grown('page_hash_mismatch_total') + grown('journal_damaged_total'):g} damaged, "
        f"{facts['quarantined']} in quarantine",
    }

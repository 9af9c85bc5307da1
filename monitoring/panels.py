"""What the three dashboards show: panels as plain data, read by the generator, the pictures and the tests.

Knows nothing of Grafana. Every query here is run against a real Prometheus by tests/system/test_prometheus.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One panel. `queries`: (expression, legend) pairs; `quiet`: why it shows nothing in a plain run, or empty."""

    title: str
    unit: str
    queries: tuple[tuple[str, str], ...]
    quiet: str = ""


@dataclass(frozen=True)
class Dashboard:
    """One dashboard, two panels a row."""

    uid: str
    title: str
    text: str
    panels: tuple[Panel, ...]


def percentiles(series: str, legend: str = "") -> tuple[tuple[str, str], ...]:
    """The recorded median and 95th percentile of a histogram."""
    return tuple((f"outrigger:{series}:p{q}_5m", f"p{q} {legend}".strip()) for q in (50, 95))


def rate(series: str, label: str = "") -> tuple[tuple[str, str], ...]:
    """How fast a counter grows, by one label."""
    by = f" by ({label})" if label else ""
    return ((f"sum{by} (rate(outrigger_{series}[5m]))", f"{{{{{label}}}}}" if label else series),)


NO_FROZEN = "frozen pages are off"
NO_HELD = "no pages are held, which begins past host.kv_host_tokens"

TOKEN = Dashboard(
    "outrigger-token",
    "Outrigger: the trip of a token",
    "From a request's arrival to its last token.",
    (
        Panel("Time to first token", "s", percentiles("time_to_first_token_seconds")),
        Panel("Time between tokens", "s", percentiles("inter_token_latency_seconds")),
        Panel(
            "Prefill rate: host, worker, together",
            "tok/s",
            (("outrigger:prefill_tokens_per_second:rate5m", "{{side}}"),),
        ),
        Panel("Decode rate", "tok/s", (("outrigger:decode_tokens_per_second:rate5m", "decode"),)),
        Panel("Whole requests", "s", percentiles("e2e_request_latency_seconds")),
        Panel("Requests that ended", "reqps", (("outrigger:requests:rate5m", "{{outcome}}"),)),
        Panel(
            "Requests now",
            "short",
            (
                ("sum(outrigger_requests_running)", "running"),
                ("sum(outrigger_requests_waiting)", "waiting"),
            ),
        ),
        Panel(
            "Prompt tokens by where their rows came from",
            "tok/s",
            (("outrigger:prompt_tokens:rate5m", "{{source}}"),),
        ),
        Panel("One ubatch, by side and stage", "s", percentiles("stage_seconds", "{{side}} {{phase}}")[1:]),
        Panel(
            "Share of reads spent waiting for the worker",
            "percentunit",
            (("outrigger:bubble_share:rate5m", "share"),),
        ),
        Panel("Prompts that lost rows, by cause", "ops", rate("prefix_divergence_total", "cause")),
        Panel("Answers made canonical in idle time", "tok/s", rate("canonical_tokens_total")),
    ),
)

CABLE = Dashboard(
    "outrigger-cable",
    "Outrigger: cable and worker",
    "The link, what goes over it, and how the worker is.",
    (
        Panel("Worker connected", "short", (("max(outrigger_worker_up)", "up"),)),
        Panel(
            "State as the host sees it", "short", (("max by (state) (outrigger_worker_state)", "{{state}}"),)
        ),
        Panel("Round trip of an empty frame", "s", percentiles("link_rtt_seconds")),
        Panel("Bytes over the cable", "Bps", (("outrigger:link_bytes:rate5m", "{{direction}} {{kind}}"),)),
        Panel("Heat (0 nominal to 3 critical)", "short", (("max(outrigger_worker_thermal_state)", "heat"),)),
        Panel("Memory the worker has left", "bytes", (("max(outrigger_worker_available_bytes)", "left"),)),
        Panel("Split layer", "short", (("max(outrigger_split_layer)", "first layer of the worker"),)),
        Panel("Lives of the link", "short", (("max(outrigger_worker_epoch)", "lives"),)),
        Panel("Reads that stayed on the host, by reason", "ops", rate("worker_bypass_total", "reason")),
        Panel("Worker failures, by cause", "ops", rate("worker_fallback_total", "cause")),
        Panel("Reads given back by a slow worker", "ops", rate("worker_returned_total")),
        Panel("Frames not used, by reason", "ops", rate("link_frames_dropped_total", "reason")),
        Panel("Bus messages dropped", "ops", rate("bus_dropped_total", "reason")),
    ),
)

PAGES = Dashboard(
    "outrigger-pages",
    "Outrigger: pages",
    "Old keys and values: frozen as programs, held by the worker.",
    (
        Panel(
            "Frozen page latency, by engine", "s", percentiles("frozen_page_seconds", "{{engine}}"), NO_FROZEN
        ),
        Panel(
            "Page programs, by state", "short", (("sum by (state) (outrigger_frozen_pages)", "{{state}}"),)
        ),
        Panel(
            "Failed page programs, by cause",
            "short",
            (("sum by (cause) (outrigger_frozen_failed_pages)", "{{cause}}"),),
        ),
        Panel(
            "Keys that page programs answered for",
            "ops",
            (("outrigger:frozen_keys:rate5m", "keys a second"),),
        ),
        Panel(
            "Page programs built",
            "ops",
            (*rate("frozen_builds_total"), *rate("frozen_build_seconds_total")),
        ),
        Panel("Worker can hold pages", "short", (("max(outrigger_pages_up)", "up"),)),
        Panel("Query for held pages", "s", percentiles("held_query_seconds"), NO_HELD),
        Panel(
            "Keys the worker attended, by what computed", "ops", (("outrigger:held_keys:rate5m", "{{by}}"),)
        ),
        Panel("Groups not in host memory, by who attended", "ops", rate("held_groups_total", "where")),
        Panel("Pages given to the worker", "ops", rate("held_pages_pushed_total")),
        Panel("Queries and pushes that failed", "ops", rate("held_failures_total", "what")),
        Panel("Shadow checks, by outcome", "ops", rate("shadow_checks_total", "outcome")),
    ),
)

DASHBOARDS = (TOKEN, CABLE, PAGES)

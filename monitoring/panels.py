"""What the three dashboards show: panels as plain data, read by the generator, the pictures and the tests.

Knows nothing of Grafana. Every query here is run against a real Prometheus by tests/system/test_prometheus.py.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Panel:
    """One panel. `queries`: (expression, legend) pairs; `quiet`: what makes it show more than zeros, when that is a
    fault; empty: a system that is used does."""

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


def rate(series: str, label: str = "", legend: str = "") -> tuple[tuple[str, str], ...]:
    """How fast a counter grows, by one label."""
    by = f" by ({label})" if label else ""
    named = legend or (f"{{{{{label}}}}}" if label else series)
    return ((f"sum{by} (rate(outrigger_{series}[5m]))", named),)


def by_label(series: str, label: str) -> tuple[tuple[str, str], ...]:
    """A gauge, by one label."""
    return ((f"sum by ({label}) (outrigger_{series})", f"{{{{{label}}}}}"),)


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
            "the worker is slower than the host",
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
        Panel(
            "Condition by its own words",
            "short",
            (("max by (condition) (outrigger_worker_condition)", "{{condition}}"),),
        ),
        Panel("Round trip of an empty frame", "s", percentiles("link_rtt_seconds")),
        Panel("Bytes over the cable", "Bps", (("outrigger:link_bytes:rate5m", "{{direction}} {{kind}}"),)),
        Panel(
            "Heat (0 nominal to 3 critical, -1 unknown)",
            "short",
            (("max(outrigger_worker_thermal_state)", "heat"),),
            "the worker gets warm",
        ),
        Panel("Memory the worker has left", "bytes", (("max(outrigger_worker_available_bytes)", "left"),)),
        Panel("Split layer", "short", (("max(outrigger_split_layer)", "first layer of the worker"),)),
        Panel("Lives of the link", "short", (("max(outrigger_worker_epoch)", "lives"),)),
        Panel("Reads that stayed on the host, by reason", "ops", rate("worker_bypass_total", "reason")),
        Panel(
            "Worker failures, by cause",
            "ops",
            rate("worker_fallback_total", "cause"),
            "the worker fails during a read",
        ),
        Panel(
            "Reads given back by a slow worker",
            "ops",
            rate("worker_returned_total"),
            "the worker becomes slow during a read, and host.split_guard is on",
        ),
        Panel(
            "Frames not used, by reason",
            "ops",
            rate("link_frames_dropped_total", "reason"),
            "a frame is damaged, or late",
        ),
        Panel(
            "Bus messages dropped",
            "ops",
            rate("bus_dropped_total", "reason"),
            "messages are late, lost or not ours",
        ),
    ),
)

FROZEN = (
    Panel("Frozen page latency, by engine", "s", percentiles("frozen_page_seconds", "{{engine}}")),
    Panel("Page programs, by state", "short", by_label("frozen_pages", "state")),
    Panel(
        "Keys that page programs answered for", "ops", (("outrigger:frozen_keys:rate5m", "keys a second"),)
    ),
    Panel("Page programs built", "ops", (*rate("frozen_builds_total"), *rate("frozen_build_seconds_total"))),
    Panel(
        "Failed page programs, by cause",
        "short",
        by_label("frozen_failed_pages", "cause"),
        "a page program cannot be built or loaded, or is wrong or slow",
    ),
)

HELD = (
    Panel("Worker can hold pages", "short", (("max(outrigger_pages_up)", "up"),)),
    Panel("Full pages, by where a copy is", "short", by_label("held_pages", "where")),
    Panel("Tokens in full pages, by where a copy is", "short", by_label("held_tokens", "where")),
    Panel("Groups that each worker answers for", "short", by_label("worker_groups", "worker")),
    Panel("Pace of each worker, a row and group", "s", by_label("worker_pace_seconds", "worker")),
    Panel("Query for held pages, there and back", "s", percentiles("held_query_seconds")),
    Panel("Keys the worker attended, by what computed", "ops", (("outrigger:held_keys:rate5m", "{{by}}"),)),
    Panel(
        "Attention by pages, of each second",
        "percentunit",
        (
            (
                "sum by (part, rows) (rate(outrigger_page_attention_seconds_total[5m]))",
                "{{part}}, {{rows}} row(s)",
            ),
        ),
    ),
    Panel("Groups not in host memory, by who attended", "ops", rate("held_groups_total", "where")),
    Panel(
        "Queries and pages over the cable",
        "Bps",
        (("outrigger:attention_bytes:rate5m", "{{direction}} {{kind}}"),),
    ),
    Panel(
        "Pages that workers took",
        "ops",
        (("outrigger:pages_pushed:rate5m", "all"), *rate("pages_repushed_total", legend="once more")),
    ),
    Panel(
        "Out of the host's memory, and back",
        "ops",
        (
            *rate("held_released_groups_total", legend="groups let go"),
            *rate("pages_recalled_total", legend="pages recalled"),
        ),
    ),
    Panel("Shadow checks, by outcome", "ops", rate("shadow_checks_total", "outcome")),
    Panel(
        "Answered from the journal instead, by cause",
        "ops",
        (("outrigger:pages_fallback:rate5m", "{{cause}}"),),
        "a worker that holds pages fails",
    ),
    Panel(
        "Queries and pushes that failed",
        "ops",
        rate("held_failures_total", "what"),
        "a worker that holds pages fails",
    ),
    Panel(
        "Pages and pieces of the journal found damaged",
        "ops",
        (
            *rate("page_hash_mismatch_total", legend="on the way to a worker"),
            *rate("journal_damaged_total", legend="in the journal"),
        ),
        "a byte changes on the cable or on the disk",
    ),
    Panel(
        "Quarantine, and answers that were no numbers",
        "short",
        (
            ("sum(outrigger_pages_quarantined)", "workers in quarantine"),
            ("sum(increase(outrigger_pages_quarantines_total[5m]))", "put there in 5 min"),
            ("sum(increase(outrigger_merge_nonfinite_total[5m]))", "no numbers in 5 min"),
        ),
        "a worker's answer is not what the host computes",
    ),
)

JOURNAL = (
    Panel("Journal on disk", "bytes", (("sum(outrigger_journal_bytes)", "bytes"),)),
    Panel(
        "Age of the page that waits for the disk",
        "s",
        (("max(outrigger_journal_lag_seconds)", "age"),),
        "the disk is slow",
    ),
    Panel(
        "Pages handed over and not kept yet",
        "short",
        (("sum(outrigger_journal_lag_pages)", "pages"),),
        "the disk is slow",
    ),
    Panel(
        "Not kept, by cause",
        "ops",
        rate("journal_failures_total", "cause"),
        "the disk or the journal is full, or the broker was started again",
    ),
    Panel(
        "Found again after a start, and dropped for room",
        "ops",
        (
            *rate("journal_recoveries_total", legend="conversations found again"),
            *rate("journal_dropped_files_total", legend="files dropped"),
        ),
        "a process is started again, or the journal is full",
    ),
)

PAGES = Dashboard(
    "outrigger-pages",
    "Outrigger: pages",
    "Old keys and values: frozen as programs, held by the worker, kept in the broker's journal.",
    FROZEN + HELD + JOURNAL,
)

DASHBOARDS = (TOKEN, CABLE, PAGES)

"""Every Prometheus series, declared once: name, kind, who owns it, what its labels may be.

Label values are a closed list; where the list holds "other", whatever is not in it counts there. Names carry base
units. What docs, dashboards and alerts may ask for is in this table, and nothing else. Read by common.metrics.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from common.limits import FROZEN_ASK_BUCKETS_S, PAGE_WORKERS_MAX

PREFIX = "outrigger_"
PROCESSES = ("gateway", "mac", "broker", "bridge")

SIDES = ("host", "worker")
ROUTES = ("generate", "link", "residual", "life", "hold", "pages", "attention")
DROP_REASONS = ("stale", "replayed", "foreign", "lost")
FAILURES = (
    "down",
    "deadline",
    "stale_epoch",
    "busy",
    "refused",
    "damaged",
    "memory",
    "suspended",
    "nonfinite",
    "order",
    "count",
    "range",
    "other",
)

FROZEN_STATES = ("queued", "building", "ready", "dropped", "failed")
FROZEN_CAUSES = (
    "disk",
    "memory",
    "thermal",
    "compile",
    "hang",
    "placement",
    "slow",
    "wrong",
    "rows",
    "other",
)

PLACES = ("host", "journal", "journal_only", "worker")
WORKERS = tuple(map(str, range(1 + PAGE_WORKERS_MAX)))
JOURNAL_CAUSES = (
    "journal_full",
    "disk_full",
    "io",
    "order",
    "form",
    "unknown_conversation",
    "other",
)

SHORT_S = (0.0001, 0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.5)
STEP_S = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
REQUEST_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


@dataclass(frozen=True)
class Series:
    """One declared series. `labels` maps each label to the values it may have."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    owners: tuple[str, ...]
    text: str
    labels: dict[str, tuple[str, ...]] = field(default_factory=dict)
    buckets: tuple[float, ...] = ()
    counted: bool = False
    """Another process counts it by the buckets: grows by observe_counted."""


SERIES = (
    # --- gateway: what a client sees
    Series(
        "time_to_first_token_seconds",
        "histogram",
        ("gateway",),
        "Arrival of a request to its first token.",
        buckets=REQUEST_S,
    ),
    Series(
        "inter_token_latency_seconds",
        "histogram",
        ("gateway",),
        "Time between two tokens of one answer.",
        buckets=STEP_S,
    ),
    Series(
        "e2e_request_latency_seconds",
        "histogram",
        ("gateway",),
        "Arrival of a request to the end of its answer.",
        buckets=REQUEST_S,
    ),
    Series(
        "requests_total",
        "counter",
        ("gateway",),
        "Requests that ended, by how.",
        {"outcome": ("stop", "length", "cancelled", "refused", "busy", "deadline", "error")},
    ),
    Series(
        "host_progress_total",
        "counter",
        ("gateway",),
        "Signs of progress from the host, parts read and tokens written: grows while anything is served.",
        {"phase": ("reading", "writing")},
    ),
    Series("zmq_clients", "gauge", ("gateway",), "Clients of the public ZeroMQ endpoint."),
    Series(
        "zmq_dropped_total",
        "counter",
        ("gateway",),
        "ZeroMQ messages not used (malformed: answered with an error; refused: too many clients) or not delivered "
        "(gone: the client left; unread: it did not read, or gave no credit).",
        {"reason": ("malformed", "refused", "gone", "unread")},
    ),
    # --- mac: the model
    Series("requests_running", "gauge", ("mac",), "Requests that compute now."),
    Series("requests_waiting", "gauge", ("mac",), "Requests that wait for their turn."),
    Series(
        "prompt_tokens_total",
        "counter",
        ("mac",),
        "Prompt tokens, by where their rows came from (worker: it ran the tail layers).",
        {"source": ("cache", "host", "worker")},
    ),
    Series(
        "prefill_seconds_total",
        "counter",
        ("mac",),
        "Seconds of computing prompts, by side; both may run at once. together: first ubatch to last, as on a clock.",
        {"side": (*SIDES, "together")},
    ),
    Series(
        "prefill_tokens_total",
        "counter",
        ("mac",),
        "Prompt tokens that a side ran through its layers (of a split read: both sides, each its own layers); "
        "together: each token once. Rates are made of these and the same side's time.",
        {"side": (*SIDES, "together")},
    ),
    Series(
        "prefix_divergence_total",
        "counter",
        ("mac",),
        "Prompts that parted from the rows at hand before their end, so that rows were lost, by likely cause.",
        {
            "cause": (
                "template_date",
                "system_prompt",
                "other_chat",
                "dropped_text",
                "edited_turn",
                "other_text",
            )
        },
    ),
    Series(
        "canonical_tokens_total",
        "counter",
        ("mac",),
        "Tokens of answers run again in idle time, so that the next turn can reuse their rows.",
    ),
    Series("generation_tokens_total", "counter", ("mac",), "Generated tokens."),
    Series("decode_seconds_total", "counter", ("mac",), "Seconds of computing generated tokens."),
    Series(
        "stage_seconds",
        "histogram",
        ("mac",),
        "One ubatch in one stage of the pipeline.",
        {"side": SIDES, "phase": ("head", "tail", "import", "round_trip")},
        STEP_S,
    ),
    Series(
        "bubble_seconds_total",
        "counter",
        ("mac",),
        "Seconds of a split read in which the host waited for the worker.",
    ),
    Series(
        "worker_state",
        "gauge",
        ("mac",),
        "1 for the state the worker is in, as the host sees it.",
        {"state": ("absent", "connecting", "ready", "resting", "refused")},
    ),
    Series(
        "worker_bypass_total",
        "counter",
        ("mac",),
        "Reads that stayed on the host, by reason.",
        {"reason": ("off", "absent", "refused", "rested", "small", "slow", "other")},
    ),
    Series(
        "worker_returned_total",
        "counter",
        ("mac",),
        "Split reads whose rest went back to the host, because the worker had become too slow.",
    ),
    Series(
        "worker_fallback_total",
        "counter",
        ("mac",),
        "Worker failures after which a read was redone on the host, by cause.",
        {"cause": FAILURES},
    ),
    Series(
        "held_groups_total",
        "counter",
        ("mac",),
        "Groups of pages attended that are not in the host's memory, by who did.",
        {"where": ("worker", "journal")},
    ),
    Series("worker_attended_groups_total", "counter", ("mac",), "Groups by worker.", {"worker": WORKERS}),
    Series(
        "pages_fallback_total",
        "counter",
        ("mac",),
        "Worker failures after which groups of pages were attended from the journal, by cause.",
        {"cause": FAILURES},
    ),
    Series(
        "page_attention_seconds_total",
        "counter",
        ("mac",),
        "Seconds of attention by pages, for single tokens and for ubatches: of the compute thread (all), of these in "
        "waiting for workers alone (wait), and of workers over their answers, as they say (worker).",
        {"part": ("all", "wait", "worker"), "rows": ("one", "many")},
    ),
    Series(
        "shadow_checks_total",
        "counter",
        ("mac",),
        "Groups of pages that were attended on both sides and compared.",
        {"outcome": ("equal", "breach")},
    ),
    Series(
        "pages_recalled_total",
        "counter",
        ("mac",),
        "Pages of one layer copied from the journal back into the host's memory.",
    ),
    Series(
        "journal_lag_pages", "gauge", ("mac",), "Pages of one layer handed to the broker and not kept yet."
    ),
    Series(
        "merge_nonfinite_total",
        "counter",
        ("mac",),
        "Answers of a worker with values that are not finite; none was merged.",
    ),
    Series("split_layer", "gauge", ("mac",), "First layer that the worker runs; 0 without a worker."),
    # --- bridge: the cable and the worker at its end
    Series(
        "link_bytes_total",
        "counter",
        ("bridge",),
        "Bytes over the cable (out: to the worker), by what they carried.",
        {"direction": ("in", "out"), "kind": ("residual", "rows", "pages", "queries", "control", "other")},
    ),
    Series(
        "link_frames_dropped_total",
        "counter",
        ("bridge",),
        "Frames and requests that were not used: of an earlier life of the link, or with a wrong hash.",
        {"reason": ("stale_epoch", "bad_hash")},
    ),
    Series("link_rtt_seconds", "histogram", ("bridge",), "Round trip of an empty frame.", buckets=SHORT_S),
    Series("worker_up", "gauge", ("bridge",), "1 while a worker is connected and accepted."),
    Series("worker_epoch", "gauge", ("bridge",), "Lives of the link since the bridge started."),
    Series(
        "worker_thermal_state",
        "gauge",
        ("bridge",),
        "Heat of the worker: -1 unknown, 0 nominal, 1 fair, 2 serious, 3 critical.",
    ),
    Series(
        "worker_condition",
        "gauge",
        ("bridge",),
        "1 for how the worker says it is (silent: it says nothing).",
        {"condition": ("nominal", "throttled", "suspending", "silent")},
    ),
    Series("worker_available_bytes", "gauge", ("bridge",), "Memory that the worker says it has left."),
    # --- bridge: held pages
    Series("pages_up", "gauge", ("bridge",), "1 while a worker that can hold pages is connected."),
    Series(
        "held_query_seconds",
        "histogram",
        ("bridge",),
        "A query for held pages, from its first byte on the cable to its answer.",
        buckets=(*SHORT_S, 1.0, 5.0),
    ),
    Series(
        "held_keys_total",
        "counter",
        ("bridge",),
        "Keys that the worker attended, over all layers, by what computed.",
        {"by": ("kernels", "programs")},
    ),
    Series("held_pages_pushed_total", "counter", ("bridge",), "Pages of one layer given to the worker."),
    Series(
        "held_failures_total",
        "counter",
        ("bridge",),
        "Queries and pushes that the worker did not answer well, by cause.",
        {"what": ("query", "push"), "cause": FAILURES},
    ),
    # --- bridge: frozen pages, as the worker tells of them
    Series(
        "frozen_page_seconds",
        "histogram",
        ("bridge",),
        "One answer of one page program, by what runs it.",
        {"engine": ("coreml", "interpreter", "kernels", "other")},
        FROZEN_ASK_BUCKETS_S,
        counted=True,
    ),
    Series("frozen_pages", "gauge", ("bridge",), "Page programs, by state.", {"state": FROZEN_STATES}),
    Series(
        "frozen_failed_pages",
        "gauge",
        ("bridge",),
        "Page programs that failed, by the cause of their first failure.",
        {"cause": FROZEN_CAUSES},
    ),
    Series("frozen_keys_total", "counter", ("bridge",), "Keys that page programs answered for."),
    Series("frozen_builds_total", "counter", ("bridge",), "Page programs built, well or not."),
    Series("frozen_build_seconds_total", "counter", ("bridge",), "Seconds of building page programs."),
    # --- broker: old pages and their journal
    Series(
        "held_pages",
        "gauge",
        ("broker",),
        "Full pages of one layer of open conversations, by where a copy is (journal_only: the host has none any more).",
        {"where": PLACES},
    ),
    Series(
        "held_tokens",
        "gauge",
        ("broker",),
        "Tokens of open conversations in full pages, by where a copy of their keys and values is.",
        {"where": PLACES},
    ),
    Series("worker_groups", "gauge", ("broker",), "Groups that a worker answers for.", {"worker": WORKERS}),
    Series("worker_pace_seconds", "gauge", ("broker",), "Work for one row and group.", {"worker": WORKERS}),
    Series(
        "held_released_groups_total", "counter", ("broker",), "Groups of pages whose memory the host freed."
    ),
    Series("journal_bytes", "gauge", ("broker",), "Bytes of the journal on disk."),
    Series(
        "journal_lag_seconds",
        "gauge",
        ("broker",),
        "How long ago the page being written came in; 0 while none waits for the disk.",
    ),
    Series(
        "journal_failures_total",
        "counter",
        ("broker",),
        "Pages and states that were not kept, and other requests that were not carried out, by cause.",
        {"cause": JOURNAL_CAUSES},
    ),
    Series("journal_recoveries_total", "counter", ("broker",), "Conversations found again in the journal."),
    Series("journal_dropped_files_total", "counter", ("broker",), "Journal files dropped to make room."),
    Series("journal_damaged_total", "counter", ("broker",), "Damaged pieces of the journal that were found."),
    Series("pages_pushed_total", "counter", ("broker",), "Pages that workers took."),
    Series("pages_repushed_total", "counter", ("broker",), "Pages given again, after a worker was lost."),
    Series(
        "pages_quarantines_total",
        "counter",
        ("broker",),
        "Workers put in quarantine: an answer for pages was not what the host computes.",
    ),
    Series("pages_quarantined", "gauge", ("broker",), "Workers in quarantine now."),
    Series(
        "page_hash_mismatch_total",
        "counter",
        ("broker",),
        "Pages that did not arrive as they are in the journal.",
    ),
    # --- every process: the bus
    Series(
        "bus_dropped_total",
        "counter",
        PROCESSES,
        "Bus messages dropped or lost, by route and reason.",
        {"route": ROUTES, "reason": DROP_REASONS},
    ),
)

"""What people are shown of old pages: copies by place, the journal, what failed. Made from the processes' own metrics.

Used by `outrigger status` and `outrigger top`. Knows names of series and nothing else; asks loopback.
"""

from __future__ import annotations

from typing import Any
from urllib.parse import urlparse

from common.metrics import PLACES, PREFIX
from common.wire.messages import LaunchStatus
from services.bench.scrape import scrape

Samples = dict[str, float]
MB = 1e6


def held_facts(status: LaunchStatus) -> dict[str, Any] | None:
    """Facts of a running system, for programs; None when nothing is kept, or neither broker nor mac answers."""
    samples: Samples = {}
    for each in status.processes:
        address = urlparse(each.listens.get("metrics", "")) if each.process in ("mac", "broker") else None
        if address is None or not address.port:
            continue
        try:
            samples |= scrape(address.port)
        except OSError:
            continue  # it is on its way down or up; the table above says so
    facts = facts_of(samples)
    return facts if facts["journal_bytes"] or any(facts["pages"].values()) else None


def facts_of(samples: Samples) -> dict[str, Any]:
    """Facts of samples of mac and broker; what is not there is 0."""

    def value(series: str) -> float:
        return total(samples, series)

    return {
        "pages": {where: int(by_place(samples, "held_pages", where)) for where in PLACES},
        "tokens": {where: int(by_place(samples, "held_tokens", where)) for where in PLACES},
        "journal_bytes": int(value("journal_bytes")),
        "journal_lag_s": value("journal_lag_seconds"),
        "journal_lag_pages": int(value("journal_lag_pages")),
        "journal_failures": int(value("journal_failures_total")),
        "fallbacks": int(value("pages_fallback_total")),
        "hash_mismatches": int(value("page_hash_mismatch_total") + value("journal_damaged_total")),
        "quarantined": int(value("pages_quarantined")),
    }


def held_text(facts: dict[str, Any]) -> str:
    """Two lines for people, the second one only when something is not well."""
    tokens = facts["tokens"]
    line = (
        f"old pages: {tokens['journal']:,} tokens in the journal ({facts['journal_bytes'] / MB:,.1f} MB on disk), "
        f"{tokens['journal_only']:,} of them out of the host's memory, {tokens['worker']:,} on the worker"
    )
    troubles = {
        "pages that wait for the disk": facts["journal_lag_pages"],
        "failed requests to the journal": facts["journal_failures"],
        "worker failures that the journal answered": facts["fallbacks"],
        "damaged pages or pieces": facts["hash_mismatches"],
        "workers in quarantine": facts["quarantined"],
    }
    unwell = [f"{what}: {number}" for what, number in troubles.items() if number]
    return line + (f"\n           {'; '.join(unwell)}" if unwell else "")


def by_place(samples: Samples, series: str, where: str) -> float:
    """One place's value of a gauge by place."""
    return samples.get(f'{PREFIX}{series}{{where="{where}"}}', 0.0)


def total(samples: Samples, series: str) -> float:
    """Sum of a series over its labels."""
    return sum(value for sample, value in samples.items() if sample.partition("{")[0] == PREFIX + series)

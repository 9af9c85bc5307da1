"""Reads a process's /metrics as it would be scraped: series by name, labels included, values as numbers.

Only loopback, only text format. Used by services.bench.drill and services.bench.soak.
"""

from __future__ import annotations

import urllib.request

SCRAPE_S_MAX = 5.0


def scrape(port: int) -> dict[str, float]:
    """Every sample of the process that serves /metrics on this port. Raises OSError when nobody does."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=SCRAPE_S_MAX) as page:
        return samples(page.read().decode())


def samples(text: str) -> dict[str, float]:
    """Samples of an exposition: `name{labels}` -> value."""
    found = {}
    for line in text.splitlines():
        if line and not line.startswith("#"):
            name, _, value = line.rpartition(" ")
            found[name] = float(value)
    return found

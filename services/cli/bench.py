"""`outrigger bench NAME`: the measurements. Each lives in services.bench and speaks through services.bench.report."""

from __future__ import annotations

import click

from services.cli.lazy import LazyGroup

BENCHES = {
    "attend": ("services.bench.attend:command", "Attention by pages against flash attention, 27B geometry."),
    "convert": ("services.bench.convert:command", "Converting a 4B Gemma 3: time, memory, sizes."),
    "engine": ("services.bench.engine:command", "The engine against stock llama.cpp of the same build."),
    "held": ("services.bench.held:command", "Old pages on a worker: staggered reads, tokens, memory."),
    "link": ("services.bench.link:command", "The cable's round trip and bandwidth against plain TCP."),
    "pages": ("services.bench.pages:command", "Page programs: from stored rows to a Core ML package."),
    "palettise": ("services.bench.palettise:command", "Our k-means of weights against coremltools' own."),
    "query": ("services.bench.query:command", "The way to held pages and back, without work."),
    "recovery": (
        "services.bench.recovery:command",
        "A worker's old pages given again, against reading them from disk.",
    ),
    "rpc": (
        "services.bench.rpc:command",
        "llama.cpp over its RPC backend and ours, each against itself alone.",
    ),
    "split": ("services.bench.split:command", "Prefill on the host alone against host and worker together."),
    "split-decode": (
        "services.bench.split_decode:command",
        "A token with the head layers alone on the host.",
    ),
}


@click.group(cls=LazyGroup, commands_at=BENCHES)
def command() -> None:
    """Measure the real processes. Every bench starts what it needs on free ports and stops it again.

    Raw rows are appended to results/<bench>.jsonl; with --json the last line is one object with all figures.
    """

"""From facts to findings: what is well, what is worth knowing, what stands in the way, and the remedy. Pure.

Used by services.cli.doctor.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from services.launch.doctor.facts import Cable, Facts, FarEnd

Level = Literal["well", "note", "problem"]

USB2_MB_S_MAX = 60.0
"""480 Mb/s carry at most so much."""
FAST_MB_S_MIN = 600.0
"""10 Gb/s carry 1,250; a cable that gives half of it is one of that class."""
FAST_MBIT_MIN, USB2_MBIT_MAX = 5000, 1000
ROUND_TRIP_US_MAX = 1500.0
MODEL_MEMORY_SHARE_MAX = 0.7
WIRED_SHARE_DEFAULT = 0.75
"""What a Mac lets its GPU hold when no limit is set: about so much of the memory."""
THERMAL = {0: "nominal", 1: "fair", 2: "serious", 3: "critical"}
THERMAL_BAD = 2
LOW_MEMORY_MB = 512


@dataclass(frozen=True)
class Finding:
    """One sentence, and what to do when it is not well."""

    topic: str
    level: Level
    text: str
    remedy: str = ""


def findings(facts: Facts) -> list[Finding]:
    """All findings, in the order in which one would look."""
    parts = (_machine, _gpu, _model, _cable, _worker, _tail, _disk, _journal, _pages, _ports)
    return [finding for part in parts for finding in part(facts)]


def _machine(facts: Facts) -> Iterator[Finding]:
    it = facts.machine
    yield Finding("machine", "well", f"{it.system} {it.architecture}, {it.processor}, {it.n_cores} cores")
    memory = f"{it.memory_free_mb:,} of {it.memory_mb:,} MB of memory free"
    if facts.model.file_mb > it.memory_free_mb:
        yield Finding(
            "memory",
            "problem",
            f"{memory}; the model alone has {facts.model.file_mb:,}",
            "close programs, take a smaller model, or keep its last layers on the worker (--split-decode)",
        )
    else:
        yield Finding("memory", "well", memory)


def _gpu(facts: Facts) -> Iterator[Finding]:
    limit, memory = facts.machine.gpu_wired_limit_mb, facts.machine.memory_mb
    if limit is None:
        return
    usable = limit or int(WIRED_SHARE_DEFAULT * memory)
    text = f"the GPU may hold {usable:,} MB" + ("" if limit else " (the system's own limit)")
    if facts.model.file_mb > MODEL_MEMORY_SHARE_MAX * usable:
        wanted = (
            min(memory - 8192, int(facts.model.file_mb / MODEL_MEMORY_SHARE_MAX)) if memory > 16_384 else 0
        )
        remedy = (
            f"sudo sysctl iogpu.wired_limit_mb={wanted} (until the next start; leave 8 GB to the system)"
            if wanted > usable
            else "the machine has no more to give: take a smaller model, or --split-decode"
        )
        yield Finding("gpu", "problem", f"{text}; the model has {facts.model.file_mb:,}", remedy)
    else:
        yield Finding("gpu", "well", text)


def _model(facts: Facts) -> Iterator[Finding]:
    it = facts.model
    if it.problem:
        yield Finding("model", "problem", it.problem, "run `make setup`, or name another with --model")
        return
    text = f"{it.arch}, {it.n_layer} layers, {it.file_mb:,} MB; layers {it.split_layer} to {it.n_layer - 1}"
    yield Finding("model", "well", f"{text} have fingerprint {it.tail_fingerprint}")


def cable_class(cable: Cable) -> str:
    """In words what kind of cable it is: measured when it could be, else by the interface; empty: unknown."""
    rate = cable.bandwidth_mb_s
    if rate is not None:
        if rate <= USB2_MB_S_MAX:
            return "USB 2 class"
        return "10 Gb/s class" if rate >= FAST_MB_S_MIN else "between USB 2 and 10 Gb/s"
    speeds = [each.speed_mbit for each in cable.interfaces if each.speed_mbit]
    if not speeds:
        return ""
    if max(speeds) >= FAST_MBIT_MIN:
        return "10 Gb/s class"
    return "USB 2 class" if max(speeds) < USB2_MBIT_MAX else "between USB 2 and 10 Gb/s"


def _cable(facts: Facts) -> Iterator[Finding]:
    it = facts.cable
    if not facts.worker.expected:
        return
    kind = cable_class(it)
    parts = [kind or "speed unknown"]
    if it.bandwidth_mb_s is not None:
        parts.append(f"{it.bandwidth_mb_s:,.0f} MB/s measured")
    if it.round_trip_us is not None:
        parts.append(f"round trip {it.round_trip_us:,.0f} µs")
    if it.loopback:
        parts.append("this machine itself, no cable")
    if it.why_not_measured:
        parts.append(f"not measured: {it.why_not_measured}")
    text = ", ".join(parts)
    if kind == "USB 2 class":
        remedy = "most charging cables are USB 2: take one that says 10 Gb/s, and a port of that speed"
        yield Finding("cable", "problem", text, remedy)
    elif it.round_trip_us is not None and it.round_trip_us > ROUND_TRIP_US_MAX:
        remedy = (
            "answers take long for a cable: is it Wi-Fi, or is one side busy? Close programs, use the cable"
        )
        yield Finding("cable", "note", text, remedy)
    else:
        yield Finding(
            "cable", "well" if kind or it.loopback else "note", text, "" if kind else _measure_words(it)
        )


def _measure_words(cable: Cable) -> str:
    return (
        ""
        if cable.loopback
        else "stop what runs (`outrigger down`) and start the worker; then it is measured"
    )


def _worker(facts: Facts) -> Iterator[Finding]:
    it = facts.worker
    if not it.expected:
        yield Finding(
            "worker", "note", "none here yet", "`outrigger run` starts one; --worker-host names another"
        )
        return
    if not it.reachable:
        remedy = "start `outrigger worker` there, check the cable and its address (OUTRIGGER_WORKER_HOST)"
        yield Finding("worker", "problem", f"not reachable: {it.why_not}", remedy)
        return
    yield Finding("worker", "well", f"{it.machine or 'a worker'}, {it.state}")
    yield from _worker_health(it)


def _worker_health(it: FarEnd) -> Iterator[Finding]:
    if it.memory_free_mb is not None:
        text = f"{it.memory_free_mb:,} of {it.memory_mb or 0:,} MB free"
        low = it.memory_free_mb < LOW_MEMORY_MB
        remedy = "close apps there; below its own limit a system ends the worker" if low else ""
        yield Finding("worker memory", "problem" if low else "well", text, remedy)
    if it.thermal is not None:
        hot = it.thermal >= THERMAL_BAD
        remedy = (
            "let it cool: out of the sun and its case, not charging fast; reads fall back to the host"
            if hot
            else ""
        )
        text = THERMAL.get(it.thermal, "unknown (no sensor tells)")
        yield Finding("worker heat", "problem" if hot else "well", text, remedy)


def _tail(facts: Facts) -> Iterator[Finding]:
    it = facts.worker
    if it.greeting:
        remedy = "the same version on both sides, and a tail cut from this very model: `outrigger split`"
        yield Finding("version and tail", "problem", it.greeting, remedy)
    elif it.greeted:
        yield Finding("version and tail", "well", "protocol and fingerprint are the same on both sides")


def _disk(facts: Facts) -> Iterator[Finding]:
    free = facts.disk_free_mb
    if free is None:
        yield Finding("disk", "note", "free space could not be found out", "look at broker.journal_dir")
    elif free < facts.journal_mb:
        remedy = "make room, choose another disk (OUTRIGGER_JOURNAL_DIR) or a smaller journal (OUTRIGGER_JOURNAL_MIB)"
        yield Finding("disk", "note", f"{free:,} MB free, the journal may take {facts.journal_mb:,}", remedy)
    else:
        yield Finding("disk", "well", f"{free:,} MB free, the journal may take {facts.journal_mb:,}")


def _journal(facts: Facts) -> Iterator[Finding]:
    """Whether one conversation as long as the context finds room in the journal."""
    it, free_mb = facts.journal, facts.disk_free_mb
    if not it.holds:
        text = "none leave the host's memory: the context is not longer than its limit, or host.hold is off"
        yield Finding("old pages", "well", text)
        return
    text = f"past {it.limit_tokens:,} of {it.n_ctx:,} tokens they go to the journal"
    takes = f"{it.conversation_mb:,} MB for one conversation"
    if it.problem:
        remedy = "choose another folder (OUTRIGGER_JOURNAL_DIR); without it, requests past the limit fail"
        yield Finding("old pages", "problem", f"{text}; {it.problem}", remedy)
    elif it.conversation_mb > it.cap_mb:
        remedy = f"OUTRIGGER_JOURNAL_MIB={2 * it.conversation_mb} (two conversations), or a shorter --n-ctx"
        yield Finding("old pages", "problem", f"{text}: {takes}, which may take {it.cap_mb:,}", remedy)
    elif free_mb is not None and it.conversation_mb > free_mb + it.on_disk_mb:
        remedy = "free some, choose another disk (OUTRIGGER_JOURNAL_DIR), or a shorter --n-ctx"
        yield Finding("old pages", "problem", f"{text}: {takes}; {free_mb:,} MB are free", remedy)
    else:
        yield Finding("old pages", "well", f"{text}: {takes}, {it.on_disk_mb:,} there now")


def _pages(facts: Facts) -> Iterator[Finding]:
    """Whether a worker can help with old pages, where there are some."""
    it = facts.worker
    if not (facts.journal.holds and it.reachable and it.pages):
        return
    if it.pages == "on":
        yield Finding("worker pages", "well", "it holds old pages and answers for them")
    elif it.pages == "closed":
        remedy = "a firewall there, or another program on the port? See worker.pages_port"
        yield Finding("worker pages", "problem", "the port that it names for pages is closed", remedy)
    else:
        remedy = "start it with OUTRIGGER_WORKER_PAGES=on; until then the journal's pages are attended here"
        yield Finding("worker pages", "note", "it holds no pages", remedy)


def _ports(facts: Facts) -> Iterator[Finding]:
    if facts.runs:
        yield Finding("ports", "well", "held by what runs here; `outrigger status` tells")
        return
    for it in facts.ports:
        by = f" by {it.holder}" if it.holder else ""
        remedy = f"stop that process, or set OUTRIGGER_{it.variable} (0: any free one)"
        yield Finding("ports", "problem", f"{it.port}, for {it.purpose}: {it.reason}{by}", remedy)
    if not facts.ports:
        yield Finding("ports", "well", "all free")

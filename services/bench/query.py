"""`outrigger bench query`: what a query for held pages costs beside its work: asker, bridge, worker and back.

Real processes: a worker that holds pages only and a bridge, on free ports; this process is broker and asker. Queries
are over no group of pages, which is the way alone; then over one page as small as pages are (64 keys, one head). The
asker looks for the answer without sleeping for a moment, as the host does while it waits for a token. Afterwards nobody
asks, and the processor time of asker, bridge and worker is counted: nothing may be burnt. Raw rows:
results/query.jsonl.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import click
import numpy as np
import psutil
import xxhash

from common.config import Settings, load_settings
from common.errors import ServiceError
from common.wire import held as h
from common.wire.routes import ATTENTION, PAGES
from services.bench.processes import Processes, free_port
from services.bench.report import Report, report_options
from services.runtime.bus import BlockingAsker
from services.runtime.endpoints import route_endpoint

FORM = h.PageForm((0,), 1, 1, 32, 64, 1, "bench")
N_QUERIES, N_QUERIES_QUICK, N_WARM = 3000, 600, 200
HOT_S, ANSWER_S_MAX, START_S_MAX = 0.005, 10.0, 30.0
IDLE_S, SETTLE_S = 3.0, 0.2
HUNDREDTHS = (0.5, 0.9, 0.99)


def settings_of(processes: Processes) -> Settings:
    """Of bridge, broker and a worker that holds pages only, on free ports."""
    port, control_port = free_port(), free_port()
    flags: dict[str, object] = {
        "run_dir": str(processes.run_dir("query")),
        "data_dir": str(processes.folder),
        "worker_pages": "only",
        "worker_threads": 1,
        "worker_host": "127.0.0.1",
        "worker_port": port,
        "worker_control_port": control_port,
        "listen_port": port,
        "listen_pages_port": 0,
        "listen_control_port": control_port,
        "bridge_metrics_port": 0,
        "broker_metrics_port": 0,
        "log_format": "json",
    }
    return load_settings(None, {}, flags)


def held(broker: BlockingAsker, folder: Path) -> int:
    """Give the worker one page; returns the epoch under which it answers. Raises ServiceError."""
    image = np.random.default_rng(0).standard_normal(FORM.image_bytes // 2).astype(np.float16).tobytes()
    path = folder / "page"
    path.write_bytes(image)
    broker.send(h.WatchPages(), wait_s=START_S_MAX)
    _told(broker, h.PagesUp)
    broker.send(h.HoldPages(1, 1, FORM, 1 << 24), wait_s=START_S_MAX)
    epoch = _told(broker, h.PagesGranted).epoch
    place = h.PagePlace(0, 0, str(path), 0, xxhash.xxh3_64_intdigest(image))
    broker.send(h.PushPage(2, epoch, 1, place), wait_s=START_S_MAX)
    _told(broker, h.PagePushed)
    return epoch


def _told(broker: BlockingAsker, kind: Any) -> Any:
    until_s = time.monotonic() + START_S_MAX
    while (received := broker.recv(max(0.0, until_s - time.monotonic()))) is not None:
        if isinstance(received.message, kind):
            return received.message
        if isinstance(received.message, h.PushFailed):
            raise ServiceError(f"the worker did not take the page: {received.message.detail}")
    raise ServiceError(f"no {kind.__name__} came within {START_S_MAX:g} s")


def ask(asker: BlockingAsker, epoch: int, n: int, n_groups: int = 0) -> list[tuple[float, float]]:
    """(seconds from question to answer, milliseconds of the worker's own) of n queries, one after the other."""
    q, taken = np.ones((1, 1, FORM.head_dim), np.float32), []
    for ticket in range(n):
        query = h.Attend(epoch, ticket, 0, 1, 0, n_groups, False, 0.1, 1, 1, FORM.head_dim)
        began_s = time.perf_counter()
        asker.send(query, q)
        received = asker.recv(ANSWER_S_MAX, hot_s=HOT_S)
        seconds = time.perf_counter() - began_s
        if received is None or not isinstance(received.message, h.Attended):
            raise ServiceError(f"query {ticket} was answered {received and received.message}")
        taken.append((seconds, received.message.total_ms))
    return taken


def _cpu_s(pids: list[int]) -> float:
    return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)


def idle_cores(pids: list[int]) -> float:
    """Processor seconds a second that these processes use together while nobody asks."""
    time.sleep(SETTLE_S)
    before_s, began_s = _cpu_s(pids), time.monotonic()
    time.sleep(IDLE_S)
    return (_cpu_s(pids) - before_s) / (time.monotonic() - began_s)


def bench_query(report: Report) -> None:
    """Measure, and give the figures to `report`."""
    n = N_QUERIES_QUICK if report.quick else N_QUERIES
    with Processes() as processes:
        settings = settings_of(processes)
        processes.start("worker", "device.worker", settings)
        processes.start("bridge", "services.bridge", settings)
        endpoints = {route: route_endpoint(settings.run_dir, route) for route in (PAGES, ATTENTION)}
        report.progress("waiting for a worker that holds pages")
        with (
            BlockingAsker(PAGES, endpoints[PAGES], name="broker") as broker,
            BlockingAsker(ATTENTION, endpoints[ATTENTION], name="bench") as asker,
        ):
            epoch, taken = held(broker, processes.folder), {}
            for what, n_groups in (("", 0), ("page_", 1)):
                ask(asker, epoch, N_WARM, n_groups)
                report.progress(f"{n} queries over {n_groups} pages")
                taken[what] = ask(asker, epoch, n, n_groups)
            report.progress(f"{IDLE_S:g} s of silence")
            idle = idle_cores([os.getpid(), *processes.pids])
    _tell(report, taken, idle)


def _tell(report: Report, taken: dict[str, list[tuple[float, float]]], idle: float) -> None:
    us = {what: np.array([seconds for seconds, _ in each]) * 1e6 for what, each in taken.items()}
    worker_us = {what: 1000 * float(np.median([ms for _, ms in each])) for what, each in taken.items()}
    quantiles = {what: np.quantile(each, HUNDREDTHS) for what, each in us.items()}
    for what, each in us.items():
        each_us = [round(float(one), 1) for one in each]
        report.row(query=what or "empty", n=len(each), us=each_us, worker_us=worker_us[what], idle_cores=idle)
    report.ran("worker", "pages of 64 keys, 1 head of 32 elements")
    names = {"": "over no page: the way alone", "page_": "over one page of 64 keys, one head"}
    report.table(
        "A query for held pages, microseconds from asker over bridge and worker back",
        ["", "p50", "p90", "p99", "of these the worker's own work, p50"],
        [[names[what], *map(float, quantiles[what]), worker_us[what]] for what in us],
    )
    for what, found in quantiles.items():
        for name, value in zip(("p50", "p90", "p99"), found, strict=True):
            report.figure(f"query_{what}us_{name}", float(value), queries=len(us[what]))
    report.figure("query_worker_us_p50", worker_us["page_"], queries=len(us["page_"]))
    report.figure("idle_cpu_share", idle, queries=sum(map(len, us.values())))


@click.command()
@report_options
def command(as_json: bool, quick: bool, results_folder: Path | None) -> None:
    """Measure the way to held pages and back, with next to no work, and what both processes burn in silence."""
    report = Report("query", "none", as_json=as_json, quick=quick, results_folder=results_folder)
    bench_query(report)
    report.finish()

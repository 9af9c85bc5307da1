"""`outrigger bench recovery`: how fast a new worker has the old pages again, against reading them from the same disk.

This is the first part; what a conversation waits for is the second (recovery_cut.py).

Real processes: a worker that holds pages only, a bridge and a broker, on free ports; this process speaks as the mac
process does. Pages have the shape of a 27B's (4 key/value heads of 256 elements, 4,096 keys), fewer layers, random
bytes. The worker is killed and started again; the clock runs from the first page placed to the last, so that starting a
process is not counted. Cold: the journal's files are taken out of the system's cache first. The reading beside it takes
as many bytes of the same files, in the same state. The first round is not counted: it meets memory that the machine has
not had before. Raw rows: results/recovery.jsonl.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np

from common.config import Settings
from common.errors import ServiceError
from common.wire import held as h
from common.wire.routes import HOLD
from services.bench.processes import Processes
from services.bench.query import settings_of
from services.bench.recovery_cut import MODEL, measure, tell
from services.bench.report import Report, report_options
from services.runtime.bus import BlockingAsker
from services.runtime.endpoints import route_endpoint

N_LAYER, N_LAYER_QUICK, N_PAGES, ROUNDS = 4, 2, 8, 5
WAIT_S = 120.0
READ_BYTES = 1 << 20
UP = '"event": "pages up"'
"""What a bridge logs once it may give pages to a worker."""


def form_of(n_layer: int) -> h.PageForm:
    """A 27B's pages; groups of one page, so that every page placed is told."""
    return h.PageForm(tuple(range(n_layer)), 4, 6, 256, 4096, 1, "bench")


class Mac:
    """The mac process's end of route "hold"."""

    def __init__(self, asker: BlockingAsker, form: h.PageForm) -> None:
        self._asker, self.form = asker, form
        self.places: list[h.PagePlace] = []

    def hear(self, kind: type, fits: Callable[[Any], bool] = lambda message: True) -> Any:
        """The next message of this kind. Raises ServiceError."""
        until_s = time.monotonic() + WAIT_S
        while (received := self._asker.recv(max(0.0, until_s - time.monotonic()))) is not None:
            if isinstance(received.message, h.HoldFailed):
                raise ServiceError(f"the broker did not keep a page: {received.message.detail}")
            if isinstance(received.message, kind) and fits(received.message):
                return received.message
        raise ServiceError(f"no {kind.__name__} came within {WAIT_S:g} s")

    def keep(self, n_pages: int) -> None:
        """Hand the broker all pages; returns when the worker holds them."""
        form, rng = self.form, np.random.default_rng(0)
        self._asker.send(h.OpenConversation(1, form, 0), b"", wait_s=WAIT_S)
        number = self.hear(h.ConversationOpened).conversation
        for page in range(n_pages):
            ids = rng.integers(0, 50_000, form.page_tokens, dtype=np.int32)
            for layer in form.layers:
                said = h.KeepPage(2, number, layer, page, form.page_tokens, form.key_bytes, form.value_bytes)
                image = rng.bytes(form.image_bytes)
                self._asker.send(said, image[: form.key_bytes], image[form.key_bytes :], ids, wait_s=WAIT_S)
                self.places.append(self.hear(h.PageKept).place)

    def placed(self, group_end: int) -> float:
        """When the worker was said to hold groups up to this one or more."""
        self.hear(h.Placed, lambda placed: placed.group_end >= group_end)
        return time.perf_counter()


def forget(places: list[h.PagePlace]) -> None:
    """Take the files out of the system's cache."""
    for path in {place.path for place in places}:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)  # only what is on the disk can leave the cache
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_s(places: list[h.PagePlace], image_bytes: int) -> float:
    """Seconds of reading these images, one after the other."""
    began_s, buffer = time.perf_counter(), bytearray(READ_BYTES)
    for place in places:
        with Path(place.path).open("rb", buffering=0) as file:
            file.seek(place.offset)
            left = image_bytes
            while left and (n := file.readinto(memoryview(buffer)[: min(left, READ_BYTES)])):
                left -= n
    return time.perf_counter() - began_s


def memory_in_hand(n_bytes: int) -> mmap.mmap:
    """Memory that was touched: close it, and what others touch next is memory that the machine really has.

    A virtual machine may hand free memory back to its host after seconds; touching it then costs ten times more than
    reading the file does. The plain reading gets the memory that `forget` has just freed, so the push gets this.
    """
    memory = mmap.mmap(-1, n_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(memory, np.uint8)[:: mmap.PAGESIZE] = 1
    return memory


def push_s(processes: Processes, settings: Settings, mac: Mac, n_pages: int, cold: bool) -> float:
    """Seconds in which a worker that was started anew was given all pages but the first."""
    processes.kill("worker")
    mac.hear(h.Placed, lambda placed: placed.group_end == 0)
    n_bytes = len(mac.places) * mac.form.image_bytes
    memory = memory_in_hand(2 * n_bytes)  # the worker's, and the system's for the files
    if cold:
        forget(mac.places)
    n_up = processes.n_said("bridge", UP)
    processes.start("worker", "device.worker", settings)
    while processes.n_said("bridge", UP) == n_up:
        processes.check()
        time.sleep(0.005)
    memory.close()  # it takes milliseconds, while the first page is given
    first_s = mac.placed(1)
    return mac.placed(n_pages) - first_s


def bench_recovery(report: Report) -> None:
    """Measure, and give the figures to `report`."""
    form = form_of(N_LAYER_QUICK if report.quick else N_LAYER)
    n_bytes = (N_PAGES - 1) * len(form.layers) * form.image_bytes
    with Processes() as processes:
        settings = settings_of(processes)
        for name, module in (
            ("worker", "device.worker"),
            ("bridge", "services.bridge"),
            ("broker", "services.broker"),
        ):
            processes.start(name, module, settings)
        with BlockingAsker(HOLD, route_endpoint(settings.run_dir, HOLD), name="mac") as asker:
            mac = Mac(asker, form)
            report.progress(f"keeping {N_PAGES} pages of {len(form.layers)} layers")
            mac.keep(N_PAGES)
            mac.placed(N_PAGES)
            taken: dict[bool, list[tuple[float, float]]] = {True: [], False: []}
            n_warm = 0 if report.quick else 1
            for number in range(1 if report.quick else n_warm + ROUNDS):
                for cold in (True, False):
                    report.progress(f"round {number}, {'cold' if cold else 'cached'}")
                    pushed = push_s(processes, settings, mac, N_PAGES, cold)
                    if cold:
                        forget(mac.places)
                    read = read_s(mac.places[len(form.layers) :], form.image_bytes)
                    if number >= n_warm:
                        taken[cold].append((pushed, read))
                    report.row(
                        cold=cold, counted=number >= n_warm, push_s=pushed, read_s=read, n_bytes=n_bytes
                    )
    report.note(
        f"pushed: pages of a 27B's shape, {len(form.layers)} layers, {n_bytes >> 20} MiB of random bytes a round"
    )
    for cold, rounds in taken.items():
        pushed, read = (float(np.median([each[index] for each in rounds])) for index in (0, 1))
        name = "cold" if cold else "cached"
        report.figure(f"recovery_vs_read_{name}", pushed / read, rounds=len(rounds), n_bytes=n_bytes)
        report.figure(f"push_mib_per_s_{name}", n_bytes / pushed / (1 << 20), rounds=len(rounds))
        report.figure(f"read_mib_per_s_{name}", n_bytes / read / (1 << 20), rounds=len(rounds))


@click.command()
@report_options
def command(as_json: bool, quick: bool, results_folder: Path | None) -> None:
    """Measure how fast a worker that was started anew is given a conversation's old pages, against reading them.

    And what a conversation waits for when the cable is cut, and when mac, bridge and broker are killed, with its tokens
    compared.
    """
    report = Report("recovery", MODEL, as_json=as_json, quick=quick, results_folder=results_folder)
    bench_recovery(report)
    tell(report, measure(report))
    report.finish()

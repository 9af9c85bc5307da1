"""`outrigger bench held`: what held pages cost and gain: staggered reads, tokens with half of their pages elsewhere.

Real processes, one computing thread each: a host with its broker and bridge, a worker that holds pages only. Reads are
measured with host processes on one core and the worker on the other. For answers nobody is pinned: a query of some
hundred microseconds would wait for the core that the host's own attention takes.
Models are synthetic hybrids with a 27B's attention: 24 query heads on 4 key/value heads of 256 elements, in every
fourth layer. (A read needs nothing of the last layer but its rows.) Whoever is compared reads the same prompts in
turns, and writes the same tokens, or there is no figure.

    stagger_gain                  tokens a second of reads past the limit, two ubatches staggered / one after the other
    stagger_worker_ms, _layers_ms of an ubatch of such a read: the worker's attention, the host's layers
    decode_speedup_half_remote    a token's time with all pages in the host / with the older half on the worker
    attention_speedup_half_remote the same of its attention alone
    wait_share, read_wait_share   share of a token, and of a staggered read, in which the host only waits for the worker
    bytes_per_token, read_...     over the attention channel, both ways
    host_memory_growth            memory of the mac process's own at four times the limit / at the limit, less 1
    query_us_p50, ...             as `outrigger bench query`

Raw rows: results/held.jsonl.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import click
import numpy as np
import psutil
from numpy.typing import NDArray

from common.config import HostSettings
from common.limits import MIB
from common.model.spec import ModelSpec
from common.model.synthetic import ensure_preset
from services.bench.client import Answer
from services.bench.compared import Compared
from services.bench.held_figures import Pages, ReadSpent, TokenSpent, own_memory_bytes
from services.bench.load import BUSY_SHARE, LoadMeter
from services.bench.processes import free_port
from services.bench.query import bench_query
from services.bench.report import NotMeasuredError, Report, report_options
from services.bench.rig import Rig, Seat
from services.bench.scrape import scrape
from services.bench.texts import natural_tokens
from services.mac.hold_setup import page_form

READ_MODEL, ANSWER_MODEL = "hybrid-27b-wide", "hybrid-27b-cycle"
"""Reads: four layers that attend, and layers of some width, so that a worker takes as long as they do at some depth.
Answers: one layer that attends, the last, so that attention is most of a token and reading that far takes seconds."""
ROUNDS, ROUNDS_QUICK = 7, 3
PLACED_S_MAX = 60.0
PLACED = 'outrigger_held_tokens{where="worker"}'


@dataclass(frozen=True)
class Depths:
    """Tokens: the host's limit, where reads or answers are measured, of a page; what a round adds."""

    limit: int
    depth: int
    page_tokens: int
    n_more: int

    def settings(self) -> dict[str, object]:
        """Groups are of one page, so that what leaves the host follows its limit closely."""
        return {
            "kv_host_tokens": self.limit,
            "page_tokens": self.page_tokens,
            "group_pages": 1,
            "shadow_every": 0,
            "canonical": "off",
            "snapshot_mib": 16,  # a store with a limit of its own, which would grow with the depth up to it
        }


READING = Depths(limit=512, depth=2560, page_tokens=512, n_more=1024)
ANSWERING = Depths(limit=16_384, depth=65_536, page_tokens=4096, n_more=64)


class Watched:
    """A seat, and what its processes count."""

    def __init__(self, rig: Rig, seat: Seat) -> None:
        self.rig, self.seat = rig, seat
        settings = rig.settings(seat).metrics
        ports = {"mac": settings.mac_port, "bridge": settings.bridge_port, "broker": settings.broker_port}
        self._ports = {part: ports[part] for part in ("mac", *seat.others) if part in ports}
        self.cpu_s: dict[str, float] = {}
        """Processor seconds of each process in the last `ask`: what they say, a busy machine cannot blur."""

    def counts(self) -> dict[str, float]:
        """All series of its processes."""
        return {name: value for port in self._ports.values() for name, value in scrape(port).items()}

    def ask(self, prompt: NDArray[np.int32], n_answer: int, rows: str) -> tuple[Answer, Pages]:
        """Generate, and what was counted meanwhile of attention by pages."""
        before, began = self.counts(), self._cpu_s()
        answer = self.seat.client.generate(prompt, n_answer)
        self.cpu_s = {part: round(now - began[part], 3) for part, now in self._cpu_s().items()}
        return answer, Pages.between(before, self.counts(), rows)

    def _cpu_s(self) -> dict[str, float]:
        pids = self.rig.pids(self.seat)
        return {part: sum(psutil.Process(pid).cpu_times()[:2]) for part, pid in pids.items()}

    def wait_placed(self, n_tokens: int) -> None:
        """Until the worker holds so many tokens. Raises ServiceError."""
        self.rig.processes.wait_until(
            f"{self.seat.name}'s worker to hold {n_tokens} tokens",
            lambda: self.counts().get(PLACED, 0) >= n_tokens,
            PLACED_S_MAX,
        )


def watched_ports() -> dict[str, object]:
    """A port for each process whose counts are read."""
    return {f"{part}_metrics_port": free_port() for part in ("mac", "bridge", "broker")}


def started(rig: Rig, *seats: Seat) -> list[Watched]:
    """Once all seats serve."""
    for seat in seats:
        rig.wait_ready(seat)
    return [Watched(rig, seat) for seat in seats]


# --- reads past the limit


def measure_reads(path: Path, depths: Depths, n_rounds: int, report: Report, compared: Compared) -> None:
    """A conversation of `depth` tokens goes on by n_more, over and over with others, staggered and in turn."""
    n_ctx = depths.depth + depths.n_more + 512
    with Rig(path, n_ctx=n_ctx, **depths.settings()) as rig:  # type: ignore[arg-type]
        kept, staggered, in_turn = started(
            rig,
            rig.seat_alone(hold="off", **watched_ports()),
            rig.seat_held("staggered", **watched_ports()),
            rig.seat_held("in-turn", stagger="off", **watched_ports()),
        )
        begin = natural_tokens(
            path, depths.depth + 2
        )  # so that all of `depth` is kept: no ubatch has one row
        for watched in (kept, staggered, in_turn):
            report.progress(f"reading {len(begin)} tokens, {watched.seat.name}")
            watched.seat.client.generate(begin, 4)
        rig.tell_what_runs(report, "reads")
        for watched in (staggered, in_turn):
            watched.wait_placed(depths.depth - depths.limit)
        taken: list[tuple[ReadSpent, ReadSpent]] = []
        for number in range(n_rounds):
            more = natural_tokens(path, depths.n_more, skip=depths.depth + number * depths.n_more)
            prompt = np.concatenate((begin, more))
            meter = LoadMeter(rig.processes.pids)
            reads = [watched.ask(prompt, 2, "many") for watched in (staggered, in_turn)]
            others_share = meter.others_share()
            right = kept.seat.client.generate(prompt, 2)
            both = [ReadSpent.of(answer, len(prompt), pages) for answer, pages in reads]
            for (answer, _), watched in zip(reads, (staggered, in_turn), strict=True):
                compared.compare(f"read {number}, {watched.seat.name}", right.token_ids, answer.token_ids)
            taken.append((both[0], both[1]))
            _tell_read(report, number, both, [each.cpu_s for each in (staggered, in_turn)], others_share)
    _reads_figures(report, taken, compared)


def _tell_read(
    report: Report, number: int, both: list[ReadSpent], cpu_s: list[dict[str, float]], others_share: float
) -> None:
    for what, read, cpu in zip(("staggered", "in turn"), both, cpu_s, strict=True):
        report.progress(
            f"{what}: {read.tokens_per_s:.0f} tokens/s; an ubatch {read.ms_per_ubatch(read.seconds):.0f} ms: layers "
            f"{read.layers_ms:.0f}, own pages {read.own_pages_ms:.0f}, waiting {read.wait_ms:.0f}; worker "
            f"{read.worker_ms:.0f}; others used {others_share:.0%} of the cores"
        )
        report.row(
            kind="read", way=what, round=number, others_share=round(others_share, 4), tokens_per_s=read.tokens_per_s,
            layers_ms=read.layers_ms, own_pages_ms=read.own_pages_ms, wait_ms=read.wait_ms, worker_ms=read.worker_ms,
            cpu_s=cpu, **asdict(read),
        )  # fmt: skip
    if others_share > BUSY_SHARE:
        report.note(f"read {number}: other programs took {others_share:.0%} of the cores")


def _reads_figures(report: Report, taken: list[tuple[ReadSpent, ReadSpent]], compared: Compared) -> None:
    staggered, in_turn = (list(reads) for reads in zip(*taken, strict=True))
    took_part = {
        "tokens_compared": compared.compared,
        "groups_by_worker": min(read.pages.by_worker for read in staggered + in_turn),
    }
    gains = [a.tokens_per_s / b.tokens_per_s for a, b in taken]
    report.figure("stagger_gain", median(gains), **took_part)
    report.figure("stagger_tokens_s", median(read.tokens_per_s for read in staggered), **took_part)
    report.figure("stagger_off_tokens_s", median(read.tokens_per_s for read in in_turn), **took_part)
    for name in ("worker_ms", "layers_ms", "own_pages_ms"):
        report.figure(f"stagger_{name}", median(getattr(read, name) for read in staggered), **took_part)
    report.figure(
        "read_wait_share", median(read.pages.wait_s / read.seconds for read in staggered), **took_part
    )
    report.figure(
        "read_bytes_per_token", median(read.pages.n_bytes / read.n_tokens for read in staggered), **took_part
    )


# --- answers


def measure_answers(path: Path, depths: Depths, n_rounds: int, report: Report, compared: Compared) -> None:
    """A conversation of four times the limit is answered with all pages in the host, and half of them on a worker."""
    n_half = depths.depth // 2
    form = page_form(
        ModelSpec.read(path), HostSettings(page_tokens=depths.page_tokens, group_pages=1), "kernels"
    )
    n_bytes = form.image_bytes * len(form.layers) * n_half // depths.page_tokens
    with Rig(path, n_ctx=depths.depth + 512, pinned=False, **depths.settings()) as rig:
        kept, half = started(
            rig,
            rig.seat_alone(hold="off", **watched_ports()),
            rig.seat_held("half", hold_mib=-(-n_bytes // MIB), **watched_ports()),
        )
        prompt = natural_tokens(path, depths.depth - depths.n_more)
        at_limit = _memory_at_the_limit(rig, half, prompt[: depths.limit], report)
        for watched in (half, kept):
            report.progress(f"reading {len(prompt)} tokens, {watched.seat.name}")
            watched.seat.client.generate(prompt, 4)
        rig.tell_what_runs(report, "answers")
        half.wait_placed(n_half)
        _, read_again = half.ask(prompt, 1, "one")  # what every round's request spends before its first token
        taken: list[tuple[TokenSpent, TokenSpent]] = []
        for number in range(n_rounds):
            meter = LoadMeter(rig.processes.pids)
            (right, of_kept), (found, of_half) = (
                watched.ask(prompt, depths.n_more, "one") for watched in (kept, half)
            )
            others_share = meter.others_share()
            compared.compare(f"answer {number}", right.token_ids, found.token_ids)
            of_half = of_half.without(read_again)
            taken.append((TokenSpent.of(right, of_kept), TokenSpent.of(found, of_half)))
            _tell_answer(report, number, taken[-1], [each.cpu_s for each in (kept, half)], others_share)
            report.row(
                kind="groups", round=number, by_worker=of_half.by_worker, by_journal=of_half.by_journal
            )
        pid = rig.pids(half.seat)["mac"]
        deep = own_memory_bytes(pid)
        report.row(kind="memory", tokens=depths.depth, own_bytes=deep)
    _answers_figures(report, taken, of_half, compared)
    report.figure("host_memory_growth", deep / at_limit - 1, bytes_at_the_limit=at_limit, bytes_deep=deep)


def _memory_at_the_limit(rig: Rig, half: Watched, prompt: NDArray[np.int32], report: Report) -> int:
    """Bytes of the mac process's own after a prompt of as many tokens as stay in its memory, and an answer."""
    half.seat.client.generate(prompt, 16)
    n_bytes = own_memory_bytes(rig.pids(half.seat)["mac"])
    report.row(kind="memory", tokens=len(prompt), own_bytes=n_bytes)
    return n_bytes


def _tell_answer(
    report: Report,
    number: int,
    both: tuple[TokenSpent, TokenSpent],
    cpu_s: list[dict[str, float]],
    others_share: float,
) -> None:
    for what, token, cpu in zip(("all in the host", "half on the worker"), both, cpu_s, strict=True):
        report.progress(
            f"{what}: a token {token.all_ms:.2f} ms, attention {token.pages_ms:.2f} (waiting {token.wait_ms:.2f}, "
            f"worker {token.worker_ms:.2f}); others used {others_share:.0%} of the cores"
        )
        share = round(others_share, 4)
        report.row(kind="token", way=what, round=number, others_share=share, cpu_s=cpu, **asdict(token))
    if others_share > BUSY_SHARE:
        report.note(f"answer {number}: other programs took {others_share:.0%} of the cores")


def _answers_figures(
    report: Report, taken: list[tuple[TokenSpent, TokenSpent]], pages: Pages, compared: Compared
) -> None:
    kept, half = (TokenSpent.median(tokens) for tokens in zip(*taken, strict=True))
    took_part = {"tokens_compared": compared.compared, "groups_by_worker": pages.by_worker}
    report.figure("decode_speedup_half_remote", median(a.all_ms / b.all_ms for a, b in taken), **took_part)
    report.figure(
        "attention_speedup_half_remote", median(a.pages_ms / b.pages_ms for a, b in taken), **took_part
    )
    report.figure("ms_per_token_all_local", kept.all_ms, **took_part)
    report.figure("ms_per_token_half_remote", half.all_ms, **took_part)
    report.figure("attention_ms_all_local", kept.pages_ms, **took_part)
    report.figure("attention_ms_half_remote", half.pages_ms, **took_part)
    report.figure("worker_ms_half_remote", half.worker_ms, **took_part)
    report.figure("wait_share", half.wait_ms / half.all_ms, **took_part)
    report.figure("bytes_per_token", half.n_bytes, **took_part)


@click.command()
@report_options
def command(as_json: bool, quick: bool, results_folder: Path | None) -> None:
    """Measure reads and answers past the host's limit, with old pages on a worker, against a host that keeps them.

    Starts host, broker, bridge and worker processes of its own on free ports, one thread each.
    """
    n_rounds, compared = ROUNDS_QUICK if quick else ROUNDS, Compared()
    model = f"{READ_MODEL}+{ANSWER_MODEL}"
    report = Report("held", model, as_json=as_json, quick=quick, results_folder=results_folder)
    bench_query(report)
    measure_reads(ensure_preset(READ_MODEL), READING, n_rounds, report, compared)
    measure_answers(ensure_preset(ANSWER_MODEL), ANSWERING, n_rounds, report, compared)
    if compared.problems:
        raise NotMeasuredError("; ".join(compared.problems))
    report.figure("tokens_compared", compared.compared, tokens_compared=compared.compared)
    report.finish()

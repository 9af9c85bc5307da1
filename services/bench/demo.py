"""`outrigger demo`: one long document read by the host alone and by host and worker, then with the cable cut mid-read.

All on this machine: the worker is the real one on an emulated cable, host and worker have one core each. So the
speed-up is that of two equal devices, and not of a particular phone. Called by services.cli.demo.
"""

from __future__ import annotations

import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from common.ggml.vocabulary import Vocabulary
from common.model.spec import ModelSpec
from common.model.split import plan_split
from services.bench.client import Answer
from services.bench.faults.far_end import FarEnd
from services.bench.load import BUSY_SHARE, LoadMeter
from services.bench.pipeline import equal_sides_limit
from services.bench.processes import cores, free_port
from services.bench.report import NotMeasuredError, Report
from services.bench.rig import Rig, Seat
from services.bench.texts import natural_tokens

N_TOKENS, N_TOKENS_QUICK = 3072, 1536
N_ANSWER = 48
N_WARM_UP = 600
LINK_BYTES = "outrigger_link_bytes_total"

Write = Callable[[str], None]


@dataclass
class Demo:
    """What is shown: answers by who gave them, and the bytes that crossed the cable."""

    n_prompt: int
    split_layer: int
    n_layer: int
    alone: Answer
    both: Answer
    threads: Answer | None
    cut: Answer
    cut_fired: list[str]
    link_bytes: int
    others_share: float
    """Share of the machine that other programs took meanwhile."""

    @property
    def speedup(self) -> float:
        return self.alone.first_token_s / self.both.first_token_s

    @property
    def limit(self) -> float:
        return equal_sides_limit(len(self.both.report.stages), self.split_layer / self.n_layer)

    @property
    def answers(self) -> list[tuple[str, Answer]]:
        """Answers that are compared with the host's alone. (Other thread counts round otherwise and are not.)"""
        return [("host and worker", self.both), ("the same, cable cut mid-read", self.cut)]

    @property
    def compared(self) -> int:
        return sum(len(self.alone.token_ids) for _ in self.answers)

    @property
    def equal(self) -> int:
        return sum(
            a == b
            for _, answer in self.answers
            for a, b in zip(self.alone.token_ids, answer.token_ids, strict=False)
        )


def run_demo(path: Path, report: Report, write: Write) -> Demo:
    """Start everything, read, stream, cut. `write` gets the answers' text as it comes.

    Raises NotMeasuredError when the worker took no part or the cable was not cut.
    """
    spec = ModelSpec.read(path)
    layer = plan_split(spec, None).layer
    n_prompt = N_TOKENS_QUICK if report.quick else N_TOKENS
    prompt = natural_tokens(path, n_prompt)
    vocabulary = Vocabulary.load(path)
    metrics_port = free_port()
    with Rig(
        path,
        n_ctx=4096,
        worker_emulate="loopback",
        worker_rest_s=1.0,
        split_guard="off",
        bridge_metrics_port=metrics_port,
    ) as rig:
        report.progress("starting: a host alone; a host with bridge and worker; a host with two threads")
        alone, split = rig.seat_alone(), rig.seat_split(layer)
        threads = rig.seat_threads(2) if len(cores()) >= 2 else None
        seats = [seat for seat in (alone, split, threads) if seat]
        for seat in seats:
            rig.wait_ready(seat)
            seat.client.generate(natural_tokens(path, N_WARM_UP, skip=50_000), 1)
        rig.tell_what_runs(report, "demo")
        load = LoadMeter(rig.processes.pids)

        def read(seat: Seat, what: str) -> Answer:
            return _read(seat, what, prompt, vocabulary, report, write)

        first = read(alone, "the host alone, one core")
        two = read(threads, "the host alone, two threads on two cores") if threads else None
        before = link_bytes(metrics_port)
        both = read(split, f"host (layers 0 to {layer - 1}) and worker ({layer} to {spec.n_layer_full - 1})")
        crossed = link_bytes(metrics_port) - before
        split.client.generate(
            natural_tokens(path, N_WARM_UP, skip=60_000), 1
        )  # the next read is a cold one again
        far_end = FarEnd(rig.settings(split).worker.control_port)
        chunk = max(1, len(both.report.stages) // 2)
        far_end.arm(f"cut in chunk {chunk}")
        cut = read(split, f"the same, and the cable is cut in the middle of chunk {chunk}")
        fired = far_end.fired(0)
        far_end.close()
        others = load.others_share()
    vocabulary.close()
    shown = Demo(n_prompt, layer, spec.n_layer_full, first, both, two, cut, fired, crossed, others)
    _check(shown)
    return shown


def _read(
    seat: Seat,
    what: str,
    prompt: NDArray[np.int32],
    vocabulary: Vocabulary,
    report: Report,
    write: Write,
) -> Answer:
    """One read and its answer, streamed."""
    report.progress(f"{what}: reading {len(prompt):,} tokens")
    pending = b""

    def on_token(_index: int, token_id: int) -> None:
        nonlocal pending
        pending += vocabulary.piece(token_id)
        text = pending.decode("utf-8", errors="ignore")
        if text and text.encode() == pending:
            write(text)
            pending = b""

    started_s = time.monotonic()
    request_id = seat.client.start(prompt, N_ANSWER)
    answer = seat.client.finish(request_id, started_s, on_token)
    write("\n")
    report.progress(f"{what}: first token after {answer.first_token_s:.2f} s")
    return answer


def _check(shown: Demo) -> None:
    if not shown.both.report.tokens_worker:
        raise NotMeasuredError(f"the worker took no part: {shown.both.report.bypass_reason}")
    if not shown.cut_fired or not shown.cut.report.fallbacks:
        raise NotMeasuredError("the cable was not cut in the middle of the read")


def link_bytes(metrics_port: int) -> int:
    """Bytes over the cable so far, both ways, as the bridge counts them."""
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=5) as page:
        lines = page.read().decode().splitlines()
    return int(sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{LINK_BYTES}{{")))


def tell(report: Report, shown: Demo) -> None:
    """The table at the end, and where its limit comes from."""
    rows = [_row("host alone, one core", shown, shown.alone)]
    rows += [_row(what, shown, answer) for what, answer in shown.answers]
    if shown.threads:
        rows.append(
            (*_row("host alone, two threads", shown, shown.threads)[:-2], "", _speedup(shown, shown.threads))
        )
    columns = ("", "read s", "prompt tok/s", "answer tok/s", "tokens on worker", "same tokens", "speed-up")
    report.table(f"{shown.n_prompt:,} tokens of a document, {N_ANSWER} of an answer", columns, rows)
    n_ubatches, head = len(shown.both.report.stages), shown.split_layer / shown.n_layer
    report.note(
        f"limit of the speed-up {shown.limit:.2f}: the host still runs {head:.0%} of the layers for each of "
        f"{n_ubatches} ubatches, and the worker's layers for the last one, so that logits stay here"
    )
    if shown.others_share > BUSY_SHARE:
        share = f"{shown.others_share:.0%}"
        report.note(f"other programs took {share} of the cores meanwhile: measure speed on a quiet machine")
    report.note(
        f"the cable was cut once ({', '.join(shown.cut_fired)}); the read went on: {shown.cut.report.fallbacks}"
    )
    report.note(
        "emulation on one machine: host and worker are processes on one core each, the cable is loopback"
    )
    report.figure("prompt_tokens", shown.n_prompt)
    report.figure("speedup", shown.speedup, worker_tokens=shown.both.report.tokens_worker)
    report.figure("speedup_limit", shown.limit)
    report.figure("link_bytes", shown.link_bytes, link_bytes=shown.link_bytes)
    report.figure("compared", shown.compared, compared=shown.compared)
    report.figure("equal", shown.equal)


def _row(what: str, shown: Demo, answer: Answer) -> tuple[object, ...]:
    equal = sum(a == b for a, b in zip(shown.alone.token_ids, answer.token_ids, strict=False))
    return (
        what,
        answer.first_token_s,
        shown.n_prompt / answer.first_token_s,
        (len(answer.token_ids) - 1) / (answer.total_s - answer.first_token_s),
        answer.report.tokens_worker,
        f"{equal} of {len(shown.alone.token_ids)}",
        _speedup(shown, answer),
    )


def _speedup(shown: Demo, answer: Answer) -> float:
    return shown.alone.first_token_s / answer.first_token_s

"""`outrigger bench link`: round trip and bandwidth of the cable's protocol, bridge's code to a real worker process.

16-byte requests with 16-byte answers (PING), and 5 MiB chunks (256 tokens of 5,120 f32) with hashes on. The chunks
name a position at which the mirror does not stand, so the worker receives, hashes and refuses them: everything a cable
costs and no computing. Plain TCP with the same socket options, buffers and window takes turns with them, on the same
two cores. The bridge's side is its own Cable and its own wait; only the bus is left out.

    rtt_us_p50 rtt_us_p90 rtt_us_p99   round trip of 16 bytes, microseconds
    raw_tcp_us_p50                     the same by plain TCP
    bandwidth_vs_raw_tcp               median of the rounds' ratios, 5 MiB chunks
    bandwidth_mb_s, raw_tcp_mb_s       medians
    hash_cost_share                    of a chunk's time, hashing it on one side
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import click
import numpy as np

from common.config import load_settings
from common.errors import PositionError
from common.limits import CHUNK_WINDOW, UBATCH_TOKENS
from common.metrics import Metrics
from common.model.geometry import Geometry
from common.model.spec import ModelSpec
from common.model.split import write_tail
from common.model.synthetic import write_synthetic
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire.frames import RESIDUAL, stamp_hash
from common.wire.layout import Payload
from common.wire.messages import LinkHello
from common.wire.routes import RESIDUAL as RESIDUAL_ROUTE
from services.bench.load import BUSY_SHARE, LoadMeter
from services.bench.processes import Processes, cores, free_port
from services.bench.raw_tcp import RawClient
from services.bench.report import NotMeasuredError, Report, report_options
from services.bridge.cable import Cable
from services.bridge.greeting import greeting
from services.runtime.bus import BlockingOwner
from services.runtime.endpoints import route_endpoint

N_EMBD = 5120
GEOMETRY = Geometry(
    arch="llama", n_layer=2, n_embd=N_EMBD, n_ff=64, n_head=2, n_head_kv=1, head_dim=32, n_vocab=512
)
SMALL = bytes(16)
BURSTS = 5
"""Of chunks, by each side in a round, taking turns: one that another program met does not decide."""
WRONG_POSITION = 512
ANSWER_S_MAX = 30.0


class BridgeEnd:
    """The bridge's end of a link, asked directly: its Cable, and the wait of its data thread."""

    def __init__(
        self, address: tuple[str, int], run_dir: Path, spec: ModelSpec, split_layer: int | None = None
    ) -> None:
        """split_layer: first layer asked of the worker; None: the first one of `spec`, which is its tail."""
        self.cable = Cable(address, Metrics("bridge"), time.monotonic())
        self._owner = BlockingOwner(RESIDUAL_ROUTE, route_endpoint(run_dir, RESIDUAL_ROUTE))
        try:
            while not self.cable.connected:
                self._turn()
            self._greet(spec, spec.layer_start if split_layer is None else split_layer)
        except BaseException:
            self.close()
            raise

    def _greet(self, spec: ModelSpec, split_layer: int) -> None:
        hello = LinkHello(
            split_layer,
            spec.n_layer_full,
            spec.n_embd,
            spec.n_vocab,
            1024,
            kv_type=1,
            fingerprint_text=spec.fingerprint_text(split_layer),
            window=CHUNK_WINDOW,
        )
        self.cable.send(greeting(hello, boot_id=1), time.monotonic(), epoch=time.time_ns())
        self._heard(ext.Hello3Ok)

    def ping(self) -> None:
        """16 bytes there and 16 bytes back."""
        self.cable.send(base.Ping(len(SMALL), Payload(SMALL)), time.monotonic())
        self._heard(base.Pong)

    def chunks(self, residual: np.ndarray, n: int) -> None:
        """n chunks, CHUNK_WINDOW of them unanswered at most; each must be refused for its position."""
        in_flight = 0
        for _ in range(n):
            chunk = ext.Chunk2(WRONG_POSITION, len(residual), base.DTYPE_F32, 0, Payload(residual))
            self.cable.send(chunk, time.monotonic())
            in_flight += 1
            while in_flight >= CHUNK_WINDOW:
                in_flight -= self._refusals()
        while in_flight:
            in_flight -= self._refusals()

    def close(self) -> None:
        self.cable.abandon()
        self._owner.close()

    def _turn(self) -> list[object]:
        """What arrives next; nothing when only sending went on."""
        ready = self._owner.wait(
            ANSWER_S_MAX, self.cable, writers=[self.cable] if self.cable.wants_write else []
        )
        if not ready:
            raise NotMeasuredError(f"the worker did not answer within {ANSWER_S_MAX:g} s")
        return [event.frame for event in self.cable.turn(time.monotonic())]

    def _heard(self, kind: type) -> None:
        while not (frames := self._turn()):
            pass
        if not isinstance(frames[0], kind):
            raise NotMeasuredError(f"the worker answered {frames[0]}")

    def _refusals(self) -> int:
        frames = self._turn()
        for frame in frames:
            if not isinstance(frame, ext.Err2) or frame.code != PositionError.code:
                raise NotMeasuredError(f"the worker answered {frame}, not that the position is wrong")
        return len(frames)


@dataclass
class Round:
    """One turn of everything: round trips in seconds, chunk seconds of both, seconds of hashing one chunk."""

    raw_rtt_s: list[float] = field(default_factory=list)
    rtt_s: list[float] = field(default_factory=list)
    raw_chunk_s: float = 0.0
    chunk_s: float = 0.0
    hash_s: float = 0.0
    others_share: float = 0.0


def measure(report: Report) -> list[Round]:
    """All rounds, taking turns. Starts a worker and a plain TCP server and ends them."""
    n_rounds, n_small, n_chunks = (6, 150, 4) if report.quick else (30, 200, 8)
    residual = np.random.default_rng(0).standard_normal((UBATCH_TOKENS, N_EMBD), np.float32)
    rounds = []
    with Processes() as processes, _ends(processes) as (raw, bridge), _pinned():
        _take_turn(raw, bridge, residual, n_small, n_chunks)  # everything is warm then
        for number in range(n_rounds):
            meter = LoadMeter(processes.pids)
            measured = _take_turn(raw, bridge, residual, n_small, n_chunks)
            measured.others_share = meter.others_share()
            rounds.append(measured)
            report.progress(
                f"round {number + 1} of {n_rounds}: {1e6 * median(measured.rtt_s):.0f} µs (plain TCP "
                f"{1e6 * median(measured.raw_rtt_s):.0f}), chunks at {measured.raw_chunk_s / measured.chunk_s:.2f} of "
                f"plain TCP (others used {measured.others_share:.0%} of the cores)"
            )
            report.row(
                rtt_us=[round(1e6 * each, 1) for each in measured.rtt_s],
                raw_rtt_us=[round(1e6 * each, 1) for each in measured.raw_rtt_s],
                chunk_s=measured.chunk_s,
                raw_chunk_s=measured.raw_chunk_s,
                hash_s=measured.hash_s,
                others_share=round(measured.others_share, 4),
            )
    return rounds


def _take_turn(raw: RawClient, bridge: BridgeEnd, residual: np.ndarray, n_small: int, n_chunks: int) -> Round:
    """Everything once. Small messages and chunks of both kinds alternate in the smallest pieces that mean something."""

    def raw_small() -> None:
        raw.send(memoryview(SMALL[8:]))  # 8 bytes of head and 8 of data
        raw.take()

    def raw_chunks() -> None:
        for number in range(n_chunks):
            raw.send(data)
            if number >= CHUNK_WINDOW - 1:
                raw.take()
        for _ in range(CHUNK_WINDOW - 1):
            raw.take()

    data = memoryview(residual).cast("B")
    taken = Round()
    for _ in range(n_small):
        taken.raw_rtt_s.append(_seconds(raw_small))
        taken.rtt_s.append(_seconds(bridge.ping))
    bursts: tuple[list[float], list[float]] = [], []
    for number in range(BURSTS):
        for side in (0, 1) if number % 2 else (1, 0):
            burst = (lambda: bridge.chunks(residual, n_chunks), raw_chunks)[side]
            bursts[side].append(_seconds(burst) / n_chunks)
    taken.chunk_s, taken.raw_chunk_s = map(median, bursts)
    chunk2 = RESIDUAL.types["CHUNK2"]
    taken.hash_s = _seconds(lambda: stamp_hash(chunk2, 1, 1, (data,)))
    return taken


def _seconds(do: Callable[[], object]) -> float:
    start = time.perf_counter()
    do()
    return time.perf_counter() - start


@contextmanager
def _ends(processes: Processes) -> Iterator[tuple[RawClient, BridgeEnd]]:
    """Both far ends running on a core of their own, and our ends connected to them."""
    whole, tail = processes.folder / "wide.gguf", processes.folder / "wide-tail.gguf"
    write_synthetic(GEOMETRY, whole)
    write_tail(whole, 1, tail)
    flags = {"tail": str(tail), "worker_ctx": 1024, "worker_threads": 1, "listen_control_port": 0}
    core = cores()[1] if len(cores()) >= 2 else None
    ports = free_port(), free_port()
    for name, module, port in zip(
        ("worker", "raw"), ("device.worker", "services.bench.raw_tcp"), ports, strict=True
    ):
        settings = load_settings(None, {}, {**flags, "listen_port": port, "log_format": "json"})
        processes.start(name, module, settings, core)
    raw = processes.connect("raw", lambda: RawClient(("127.0.0.1", ports[1])))
    run_dir, spec = processes.run_dir("bridge"), ModelSpec.read(tail)
    bridge = processes.connect("worker", lambda: BridgeEnd(("127.0.0.1", ports[0]), run_dir, spec))
    try:
        yield raw, bridge
    finally:
        bridge.close()
        raw.close()


@contextmanager
def _pinned() -> Iterator[None]:
    """This process on the first core while it plays the bridge."""
    before = cores()
    if len(before) >= 2:
        os.sched_setaffinity(0, {before[0]})
    try:
        yield
    finally:
        if len(before) >= 2:
            os.sched_setaffinity(0, set(before))


def add_figures(report: Report, rounds: list[Round]) -> None:
    """Figures of the quieter half of the rounds: chosen by what others did, never by what was measured."""
    quiet = sorted(rounds, key=lambda each: each.others_share)[: max(1, len(rounds) // 2)]
    rtt_us = np.array([1e6 * each for measured in quiet for each in measured.rtt_s])
    raw_us = np.array([1e6 * each for measured in quiet for each in measured.raw_rtt_s])
    for percent in (50, 90, 99):
        report.figure(
            f"rtt_us_p{percent}", round(float(np.percentile(rtt_us, percent)), 1), pings=len(rtt_us)
        )
    report.figure("raw_tcp_us_p50", round(float(np.percentile(raw_us, 50)), 1), pings=len(raw_us))
    n_bytes = UBATCH_TOKENS * N_EMBD * 4
    report.figure(
        "bandwidth_vs_raw_tcp", median(each.raw_chunk_s / each.chunk_s for each in quiet), rounds=len(quiet)
    )
    report.figure("bandwidth_mb_s", median(n_bytes / each.chunk_s for each in quiet) / 1e6)
    report.figure("raw_tcp_mb_s", median(n_bytes / each.raw_chunk_s for each in quiet) / 1e6)
    report.figure("hash_cost_share", median(each.hash_s / each.chunk_s for each in quiet))
    if (busiest := max(each.others_share for each in quiet)) > BUSY_SHARE:
        report.note(f"other programs took up to {busiest:.0%} of the cores; measure on a quiet machine")


@click.command()
@report_options
def command(as_json: bool, quick: bool, results_folder: Path | None) -> None:
    """Round trip and bandwidth between bridge and worker, next to plain TCP on the same cores."""
    report = Report("link", "wide-5120", as_json=as_json, quick=quick, results_folder=results_folder)
    report.ran("sockets", "loopback TCP, 4 MiB buffers, no delay; bridge on one core, worker on the other")
    add_figures(report, measure(report))
    report.finish()

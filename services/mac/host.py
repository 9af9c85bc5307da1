"""Puts the mac process together: the engine on its compute thread, the loop's two routes, the worker between them.

The only file that knows which part is which. Called by services.mac.__main__, which brings settings, the event loop
and the skeleton of a process.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, Literal

from common.config import HostSettings
from common.crash_note import Slot
from common.engine.engine import Engine
from common.engine.first_start import check_first_start
from common.engine.sequence import EngineSequence
from common.errors import LinkError, OutOfMemoryError, SettingError
from common.limits import CHUNK_WINDOW, MIB
from common.log import get_log
from common.metrics import Metrics
from common.model.spec import ModelSpec
from common.model.split import plan_split
from common.wire import messages as m
from common.wire.routes import GENERATE, LINK, RESIDUAL
from services.mac.compute import Compute
from services.mac.desk import Desk, phase_of
from services.mac.hold_setup import decoding_of, make_holding
from services.mac.pairing import Pairing
from services.mac.read_log import ReadLog
from services.mac.reading import Reads
from services.mac.requests import RequestQueue
from services.mac.split_decode import SplitDecoding
from services.mac.tally import Tally
from services.mac.tether import Tether
from services.mac.worker import Worker
from services.runtime.bus import BlockingAsker, EventSink
from services.runtime.endpoints import route_endpoint

KV_TYPE, KV_TYPE_ID = "f16", 1
COMPUTE_STOP_S = 1.2
"""How long a stopping process waits for the ubatch at hand."""

log = get_log()


def load_engine(settings: HostSettings) -> Engine:
    """Load the model. Raises ModelError, EngineError or SettingError saying what is wrong."""
    check_first_start()
    last, spec = None, ModelSpec.read(settings.model)
    if settings.split_decode == "on":
        check_split_decode(settings)
        last = choose_split_layer(settings, spec)
    engine = Engine.load(
        settings.model,
        n_ctx=settings.n_ctx,
        n_threads=settings.n_threads,
        weights=settings.weights,
        decoding=decoding_of(spec, settings),
        last=last,
    )
    log.info("model loaded", model=engine.spec.name, engine=engine.describe())
    return engine


def check_split_decode(settings: HostSettings) -> None:
    """Raises SettingError for settings that split decode cannot be combined with."""
    if settings.split == "off":
        raise SettingError(
            "split_decode is on and split is off: without a worker the host has no last layers; drop one"
        )
    if settings.decode == "paged":
        raise SettingError(
            f"decode is {settings.decode}, and with split_decode on the worker decodes fused: set decode to fused"
        )


def short_sequence(engine: Engine, settings: HostSettings) -> EngineSequence | None:
    """The sequence of the short lane; None when it is off, or memory does not allow it (short requests then wait)."""
    if not settings.short_ctx or settings.split_decode == "on":  # the worker's mirror is of one sequence
        return None
    try:
        return engine.sequence(
            min(settings.short_ctx, engine.decoding.many_rows_from or engine.n_ctx, engine.n_ctx)
        )
    except OutOfMemoryError as error:
        log.warning("no second sequence: short requests wait behind long ones", error=str(error))
        return None


def choose_split_layer(settings: HostSettings, spec: ModelSpec) -> int:
    """First layer of the tail; 0 when nothing is to be split. Raises SettingError for a layer that cannot be."""
    if settings.split == "off":
        return 0
    layer = settings.split_layer
    if layer is not None and not 1 <= layer < spec.n_layer_full:
        raise SettingError(
            f"split_layer is {layer}; {spec.name} has {spec.n_layer_full} layers, so 1 to {spec.n_layer_full - 1}"
        )
    return plan_split(spec, layer, any_layer=True).layer


class Host:
    """The running mac process. Make it inside the loop, run its `parts` beside each other, then `start` and `stop`."""

    def __init__(
        self,
        engine: Engine,
        settings: HostSettings,
        run_dir: Path,
        metrics: Metrics,
        *,
        window: int = CHUNK_WINDOW,
        page_workers: Sequence[int] = (0,),
        on_bus_event: EventSink | None = None,
        crash_slot: Slot | None = None,
    ) -> None:
        """window: most chunks in flight. page_workers: numbers of those that may hold pages. Raises SettingError.
        on_bus_event is told what the channels notice.

        crash_slot: where the compute thread says what it is about to compute.
        """
        self.engine = engine
        self.state: Literal["starting", "ready", "draining"] = "starting"
        self._spec = engine.spec if settings.split_decode == "off" else ModelSpec.read(settings.model)
        """Of the whole model, of which the engine may hold the first layers only."""
        split_layer = choose_split_layer(settings, self._spec)
        self._queue = RequestQueue()
        self._worker = Worker(split_layer, rest_s=settings.worker_rest_s)
        self._tally = Tally(metrics)
        engine.watch_attention(self._tally.attended_by_pages)
        self._tether: Tether | None = None
        self._residual: BlockingAsker | None = None
        self._desk = Desk(
            route_endpoint(run_dir, GENERATE),
            self._queue,
            self._stands,
            self._told,
            on_bus_event=on_bus_event,
        )
        if split_layer:
            hello = link_hello(engine, self._spec, split_layer, window)
            link, residual = route_endpoint(run_dir, LINK), route_endpoint(run_dir, RESIDUAL)
            self._tether = Tether(link, self._worker, hello, self._changed, on_bus_event=on_bus_event)
            self._residual = BlockingAsker(RESIDUAL, residual, name="mac", on_event=on_bus_event)
        self._window = window
        on_read = ReadLog(run_dir, engine.spec.name, engine.spec.n_layer_full).add
        reads = self._reads(settings, on_read)
        self._holding = make_holding(engine, settings, run_dir, self._tally, on_bus_event, page_workers)
        self._compute = Compute(
            engine,
            self._queue,
            self._worker,
            self._desk.emit,
            reads,
            short_sequence=short_sequence(engine, settings),
            canonical=settings.canonical == "idle" and settings.split_decode == "off",
            snapshot_bytes=settings.snapshot_mib * MIB,
            tally=self._tally,
            holding=self._holding,
            crash_slot=crash_slot,
        )
        self._kernels = kernels_text(engine, split_layer if settings.split_decode == "on" else 0)
        self._phases: asyncio.Queue[m.ShowPhase] = asyncio.Queue(maxsize=1)
        self._thread: threading.Thread | None = None

    def _reads(self, settings: HostSettings, on_read: Callable[[m.ReadReport], None]) -> Reads:
        """Who begins the reads: of a host with the whole model, or of one without the last layers."""
        if settings.split_decode == "on":
            assert self._residual is not None, "split decode has a split layer"
            wait_s, n_ctx = settings.split_decode_wait_s, self.engine.n_ctx
            return SplitDecoding(
                self._spec,
                n_ctx,
                self._worker,
                self._residual,
                self._tally,
                wait_s=wait_s,
                on_link_failure=self._link_failed,
                on_read=on_read,
                clock=self._queue.clock,
            )
        return Pairing(
            self.engine,
            self._worker,
            self._residual,
            self._tally,
            split_tokens_min=settings.split_tokens_min,
            guarded=settings.split_guard == "on",
            layer_pinned=settings.split_layer is not None,
            on_split_layer=self._split_elsewhere,
            on_link_failure=self._link_failed,
            on_read=on_read,
            clock=self._queue.clock,
        )

    @property
    def beat(self) -> int:
        """Grows with every turn of the compute thread."""
        return self._compute.beat

    def parts(self) -> list[tuple[str, Coroutine[Any, Any, None]]]:
        """What runs on the loop beside each other, by name, until it is cancelled."""
        parts = [("desk", self._desk.run())]
        if self._tether:
            parts += [("tether", self._tether.run()), ("phases", self._show_phases(self._tether))]
        return parts

    def start(self) -> None:
        """Begin to compute."""
        self._thread = self._compute.start()
        self.state = "ready"
        self._changed()

    async def stop(self) -> None:
        """Take nothing new, end what runs within one ubatch, free the engine."""
        self.state = "draining"
        self._changed()
        self._queue.close()
        if self._thread is None:
            return
        await asyncio.to_thread(self._thread.join, COMPUTE_STOP_S)
        await self._desk.flush()
        if self._thread.is_alive():
            log.warning("left without waiting for the ubatch at hand", waited_s=COMPUTE_STOP_S)
            return
        if self._residual:
            self._residual.close()
        if self._holding:
            self._holding.close()
        self.engine.close()

    def status(self) -> m.HostStatus:
        """How the host is right now."""
        running, waiting = self._queue.counts()
        return m.HostStatus(
            state=self.state,
            model=self.engine.spec.name,
            n_ctx=self._compute.n_ctx,
            n_vocab=self.engine.spec.n_vocab,
            requests_running=running,
            requests_waiting=waiting,
            worker=self._worker.view(),
            beat=self.beat,
            kernels=self._kernels,
            tokens_provisional=self._compute.n_provisional,
        )

    # --- inside

    def _changed(self) -> None:
        self._stands()
        self._desk.tell_status()

    def _stands(self) -> m.HostStatus:
        """The status, counted: the desk asks for it whenever a request came, began or ended."""
        status = self.status()
        self._tally.stands(status)
        return status

    def _link_failed(self, error: LinkError) -> None:
        if self._tether:
            self._tether.failed(error)

    def _split_elsewhere(self, layer: int) -> None:
        """The compute thread moved the split: the worker is to run other layers."""
        if self._tether:
            self._tether.reopen(link_hello(self.engine, self._spec, layer, self._window))

    def _told(self, message: m.Message) -> None:
        """An event went out: what the worker's screen says may change. The newest phase replaces one not yet shown."""
        phase = phase_of(message)
        if phase is None or self._tether is None:
            return
        if self._phases.full():
            self._phases.get_nowait()
        self._phases.put_nowait(phase)

    async def _show_phases(self, tether: Tether) -> None:
        while True:
            await tether.show(await self._phases.get())


def kernels_text(engine: Engine, last: int = 0) -> str:
    """What computes, as one line. last: the host holds the layers before it only (0: all)."""
    told = engine.describe()
    layouts = " and ".join(f"{count} tensors {layout}" for layout, count in told["weights"].items())
    n_layer = engine.spec.n_layer_full
    here = f"layers 0 to {last - 1} of {n_layer} here, the rest on the worker; " if last else ""
    return here + (
        f"{told['device']} ({told['device_description']}), {told['n_threads']} threads, {told['attention']} attention, "
        f"{told['kv_type']} rows, weights: {layouts}; ggml {told['ggml']}, wheel {told['wheel']}"
    )


def link_hello(engine: Engine, spec: ModelSpec, split_layer: int, window: int) -> m.LinkHello:
    """Our half of the handshake: what the worker must match. spec: of the whole model.

    An engine without the output head asks the worker for its.
    """
    output = not engine.spec.has_output
    return m.LinkHello(
        split_layer=split_layer,
        n_layer_full=spec.n_layer_full,
        n_embd=spec.n_embd,
        n_vocab=spec.n_vocab,
        n_ctx=engine.n_ctx,
        kv_type=KV_TYPE_ID,
        fingerprint_text=spec.fingerprint_text(split_layer, KV_TYPE, output=output),
        output=output,
        window=window,
        device=engine.describe()["device"],
    )

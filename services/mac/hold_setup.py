"""How the settings of the host's memory become an engine that decodes by pages, and a Holding for its old pages.

The limit is the position from which on reads go by pages and old pages may leave memory; it follows from settings and
the model alone, so that bits do not depend on who holds what. Called by services.mac.host.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from common.config import HostSettings
from common.engine.engine import Decoding, Engine
from common.engine.forms import remembered_form
from common.engine.page_kernel import Form
from common.ggml.backend import Backend, choose_device
from common.ggml.memory import return_large_blocks
from common.limits import UBATCH_TOKENS
from common.model.spec import ModelSpec
from common.wire import held as h
from common.wire.fingerprint import fingerprint
from common.wire.routes import ATTENTION, HOLD, Route
from services.mac.holding import Holding
from services.mac.remote_pages import HeldWorker
from services.mac.tally import Tally
from services.runtime.bus import BlockingAsker, EventSink
from services.runtime.endpoints import route_endpoint

KV_TYPE = "f16"
ROOM_GROUPS = 2
"""Groups beyond the limit that are in memory while the oldest are on their way out."""


def page_form(spec: ModelSpec, settings: HostSettings, many_rows: Form, model: str = "") -> h.PageForm:
    """The shape of the pages. model: names it, where pages of several could meet."""
    return h.PageForm(
        layers=tuple(n for n in spec.layers if spec.kind(n) == "attention"),
        n_head_kv=spec.n_head_kv,
        n_group=spec.n_head // spec.n_head_kv,
        head_dim=spec.head_dim,
        page_tokens=settings.page_tokens,
        group_pages=settings.group_pages,
        model=model,
        many_rows=many_rows,
    )


def host_limit(spec: ModelSpec, settings: HostSettings) -> int:
    """The host's limit in tokens, by both settings."""
    form = page_form(spec, settings, "kernels")
    return form.host_tokens(settings.kv_host_tokens, settings.kv_host_bytes)


def decoding_of(spec: ModelSpec, settings: HostSettings) -> Decoding:
    """How this engine decodes. `auto`: by pages where the context is longer than the host's limit."""
    limit = host_limit(spec, settings)
    path = settings.decode
    if path == "auto":
        path = "paged" if settings.n_ctx > limit and settings.split_decode == "off" else "fused"
    if path == "fused" or settings.n_ctx <= limit:
        return Decoding(path, settings.page_tokens, settings.group_pages)
    backend = Backend(choose_device("cpu"), settings.n_threads)
    try:
        many_rows = remembered_form(backend)
    finally:
        backend.close()
    room = limit + ROOM_GROUPS * settings.page_tokens * settings.group_pages + 2 * UBATCH_TOKENS
    return Decoding(
        path,
        settings.page_tokens,
        settings.group_pages,
        many_rows_from=limit,
        many_rows=many_rows,
        resident_tokens=room if settings.hold == "on" else None,
        stagger=settings.stagger == "on",
    )


def make_holding(
    engine: Engine,
    settings: HostSettings,
    run_dir: Path,
    tally: Tally,
    on_bus_event: EventSink | None,
    numbers: Sequence[int],
) -> Holding | None:
    """Where the engine's old pages go; None where all stay in memory. numbers: of the workers that may hold some."""
    limit = engine.decoding.many_rows_from
    if settings.hold == "off" or limit is None or limit >= engine.n_ctx:
        return None
    return_large_blocks()
    model = fingerprint(engine.spec.fingerprint_text(0, KV_TYPE)).hex()
    form = page_form(engine.spec, settings, engine.decoding.many_rows, model)
    workers = [HeldWorker(number, asker(ATTENTION, run_dir, on_bus_event, number)) for number in numbers]
    hold = asker(HOLD, run_dir, on_bus_event)
    return Holding(engine.own, form, limit, hold, workers, tally, shadow_every=settings.shadow_every)


def asker(route: Route, run_dir: Path, on_bus_event: EventSink | None, worker: int = 0) -> BlockingAsker:
    """Our end of a route."""
    return BlockingAsker(route, route_endpoint(run_dir, route, worker), name="mac", on_event=on_bus_event)

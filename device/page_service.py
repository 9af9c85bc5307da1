"""What the worker says to each request about pages: frames in, frames out, on top of a PageStore.

One client at a time uses it. Pages outlive the connection that brought them when they have a session, so that a cable
that was cut costs no second push; anything else is dropped with its client. Knows no sockets; called by page_desk.py
under its lock.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from common.errors import EngineError, ModelError, OutriggerError, PositionError, RemoteProtocolError
from common.limits import FRAME_BYTES_MAX, GROUP_PAGES, MIB, PAGE_TOKENS
from common.wire import attention_base_frames as base
from common.wire import attention_extension_frames as ext
from common.wire.base_frames import DTYPE_F32, bounded_text
from common.wire.extension_frames import EXTENSION_VERSION, FEATURE_F32_PARTIALS, LSE_BASE_NATURAL
from common.wire.fingerprint import fingerprint
from common.wire.frames import Frame
from common.wire.frozen import FrozenReport
from common.wire.layout import Payload
from device.held_group import HeldForm
from device.page_store import PageStore
from device.service import Terms

BYTES_MAX = 1 << 62
"""What base peers ask for: they do not say."""


class PageService:
    """Answers over one store, whose pages may outlive a connection."""

    def __init__(self, store: PageStore, terms: Terms, clock: Callable[[], float] = time.monotonic) -> None:
        self.store, self.terms = store, terms
        self._clock = clock
        self._keeps = False
        self._methods: dict[type[Frame], Callable[[Any], Frame]] = {
            ext.Hello3: self._hello3,
            base.Hello: lambda _: base.HelloOk(base.VERSION, 0, bounded_text(self.terms.device, 64)),
            base.Config: self._config,
            base.Append: self._append,
            base.Truncate: self._truncate,
            base.Attn: self._attn,
            base.AttnBig: self._attn,
            base.Stats: self._stats,
            base.Ping: lambda ping: base.Ok(Payload(bytes(ping.reply_len))),
            base.Fetch: self._fetch,
        }
        self._methods2: dict[type[Frame], Callable[[Any, int, float], Frame]] = {
            ext.Config2: self._config2,
            ext.Append2: self._append2,
            ext.Attn2: self._attn2,
            ext.Truncate2: self._truncate2,
            ext.Fetch2: self._fetch2,
        }

    # --- what others ask

    @property
    def n_keys(self) -> int:
        """Keys that every layer holds."""
        return self.store.n_keys

    def frozen_report(self) -> FrozenReport | None:
        """None where nothing is frozen."""
        frozen = self.store.frozen
        return frozen.report() if frozen else None

    def answer(self, frame: Frame, seq: int, queue_s: float) -> Frame:
        """The answer to `frame`, number `seq`, that waited queue_s for its turn. Raises OutriggerError."""
        if (method2 := self._methods2.get(type(frame))) is not None:
            return method2(frame, seq, queue_s)
        return self._methods[type(frame)](frame)

    def failure(self, frame: Frame | None, seq: int, error: OutriggerError) -> Frame:
        """The frame that says why `frame` was not done; None: its hash was wrong."""
        if frame is None or frame.stamped:
            return ext.Err2.of(seq, error.code, self.n_keys, str(error))
        return base.Err(bounded_text(f"E{error.code} {error}"))

    def client_gone(self) -> None:
        """The client has left: drop what nobody can come back to."""
        if not self._keeps:
            self.store.drop()

    def drop(self) -> None:
        """Hold nothing."""
        self.store.drop()
        self._keeps = False

    # --- extension

    def _hello3(self, hello: ext.Hello3) -> ext.Hello3Ok:
        if not hello.ext_min <= EXTENSION_VERSION <= hello.ext_max:
            raise RemoteProtocolError(
                f"the host speaks extension versions {hello.ext_min} to {hello.ext_max} and this worker "
                f"{EXTENSION_VERSION}: run the same version of outrigger on both"
            )
        if hello.lse_base != LSE_BASE_NATURAL or hello.kv_type != ext.KV_TYPE_F16:
            raise ModelError(
                f"the host asks for lse base {hello.lse_base} and KV type {hello.kv_type}; this worker has 1 (natural "
                f"logarithm) and {ext.KV_TYPE_F16} (f16)"
            )
        return ext.Hello3Ok(
            ext_min=EXTENSION_VERSION,
            ext_max=EXTENSION_VERSION,
            boot_id=self.terms.boot_id,
            features=FEATURE_F32_PARTIALS,
            lse_base=LSE_BASE_NATURAL,
            kv_type=ext.KV_TYPE_F16,
            page_tokens=PAGE_TOKENS,
            group_pages=GROUP_PAGES,
            frame_mib_max=FRAME_BYTES_MAX // MIB,
            window=self.terms.window,
            split_layer=0,
            n_layer_full=0,
            n_embd=0,
            n_vocab=0,
            n_ctx=0,
            device=bounded_text(self.terms.device, 64),
            fingerprint=fingerprint(""),
            text="",
        )

    def _config2(self, config: ext.Config2, seq: int, _queue_s: float) -> ext.Config2Ok:
        form = self._form_of(config)
        session = config.session if config.keep else 0
        granted = self.store.configure(form, config.bytes_wanted, session=session, keep=session != 0)
        self._keeps = session != 0
        return ext.Config2Ok(seq, granted.n_bytes, granted.tokens_max, granted.n_keys)

    def _form_of(self, config: ext.Config2) -> HeldForm:
        """Raises ModelError for pages that this worker does not hold."""
        if config.kv_type != ext.KV_TYPE_F16 or config.head_dim_k != config.head_dim_v:
            raise ModelError(
                f"CONFIG2 asks for pages of KV type {config.kv_type} with heads of {config.head_dim_k} and "
                f"{config.head_dim_v} elements; this worker holds KV type {ext.KV_TYPE_F16} (f16), both heads alike"
            )
        return HeldForm(
            config.layer_numbers,
            config.n_head_kv,
            config.n_group,
            config.head_dim_k,
            config.page_tokens,
            config.group_pages,
            ext.MANY_ROWS[config.many_rows],  # type: ignore[arg-type]
        )

    def _append2(self, append: ext.Append2, seq: int, _queue_s: float) -> ext.Ok2:
        form = self.store.form
        if form is not None and append.n != form.page_tokens:
            raise PositionError(f"a page of {append.n} keys; pages have {form.page_tokens} and travel full")
        if not append.piece.n_bytes:
            raise PositionError(f"an empty piece of page {append.page} of layer {append.layer}")
        piece = np.frombuffer(append.piece.joined(), np.uint8)
        args = (append.layer, append.page, append.offset, piece, append.image_xxh3)
        return ext.Ok2(seq, self.store.put_piece(*args))

    def _attn2(self, asked: ext.Attn2, seq: int, queue_s: float) -> ext.Attn2Ok:
        began, form = self._clock(), self._form
        dtype = np.float32 if asked.q_dtype == DTYPE_F32 else np.float16
        q = np.frombuffer(asked.q.joined(), dtype).astype(np.float32, copy=False)
        q = q.reshape(form.n_head_kv, form.n_group * asked.n_tok, form.head_dim)
        groups = range(asked.group_first, asked.group_end)
        found = self.store.attend(
            asked.layer, q, asked.scale, asked.n_tok, groups, per_group=bool(asked.per_group)
        )
        pieces = [np.ascontiguousarray(getattr(part, name)) for name in "mlo" for part in found.parts]
        return ext.Attn2Ok(
            answers=seq,
            n_parts=len(found.parts),
            n_keys=found.n_keys,
            n_keys_frozen=found.n_keys_frozen,
            total_ms=1000 * (self._clock() - began),
            frozen_ms=found.frozen_ms,
            generic_ms=found.generic_ms,
            queue_ms=1000 * queue_s,
            parts=Payload(*pieces),
        )

    def _truncate2(self, asked: ext.Truncate2, seq: int, _queue_s: float) -> ext.Ok2:
        return ext.Ok2(seq, self.store.truncate(asked.n))

    def _fetch2(self, asked: ext.Fetch2, seq: int, _queue_s: float) -> ext.Ok2:
        image = self.store.image(asked.layer, asked.page)
        return ext.Ok2(seq, self.n_keys, Payload(image))

    @property
    def _form(self) -> HeldForm:
        if self.store.form is None:
            raise EngineError("no pages were configured yet; say CONFIG or CONFIG2 first")
        return self.store.form

    # --- base

    def _config(self, config: base.Config) -> base.Ok:
        wanted = (base.KV_F16, base.HEAD_DIM * base.F16_BYTES)
        if (config.kv_type, config.head_bytes) != wanted or not config.n_layer or not config.n_head_kv:
            raise ModelError(
                f"CONFIG asks for {config.n_layer} layers of {config.n_head_kv} heads, KV type {config.kv_type}, "
                f"{config.head_bytes} bytes a head; this worker holds KV type 0 (f16; 1, q8_0, and 2, q4_0, are not "
                f"supported) with {wanted[1]} bytes a head"
            )
        form = HeldForm(
            tuple(range(config.n_layer)),
            config.n_head_kv,
            base.QUERY_ROWS // base.QUERY_TOKENS,
            base.HEAD_DIM,
            PAGE_TOKENS,
            GROUP_PAGES,
        )
        self._keeps = False
        self.store.configure(form, BYTES_MAX, by_rows=True)
        return base.Ok()

    def _append(self, append: base.Append) -> base.Ok:
        k_rows, v_rows = np.frombuffer(append.rows.joined(), np.uint8).reshape(2, append.n, -1)
        n_now = self.store.append_rows(append.layer, append.pos0, k_rows, v_rows)
        return base.Ok(Payload(struct.pack("<I", n_now)))

    def _truncate(self, asked: base.Truncate) -> base.Ok:
        self.store.truncate(asked.n)
        return base.Ok()

    def _attn(self, asked: base.Attn | base.AttnBig) -> base.AttnOk:
        """Blocks of 48 rows, all of which see the same keys, side by side."""
        began, n_head = self._clock(), self._form.n_head_kv
        blocks = np.frombuffer(asked.q.joined(), np.float16)
        blocks = blocks.reshape(-1, n_head, base.QUERY_ROWS, base.HEAD_DIM)
        q = blocks.swapaxes(0, 1).reshape(n_head, -1, base.HEAD_DIM).astype(np.float32)
        n_keys = asked.nk or self.store.n_held_by(asked.layer)
        o, lse = self.store.attend_keys(asked.layer, q, asked.scale, n_keys).normalised()
        pieces: list[np.ndarray] = []
        for number in range(len(blocks)):
            rows = slice(number * base.QUERY_ROWS, (number + 1) * base.QUERY_ROWS)
            pieces += [np.ascontiguousarray(o[:, rows], np.float16), np.ascontiguousarray(lse[:, rows])]
        total_ms = 1000 * (self._clock() - began)
        return base.AttnOk(n_keys, total_ms, 0.0, total_ms, 0, 0, Payload(*pieces))

    def _stats(self, _: base.Stats) -> base.Ok:
        return base.Ok(Payload(f"keys held {self.n_keys}, queries {self.store.n_calls}".encode()))

    def _fetch(self, asked: base.Fetch) -> base.Ok:
        if not asked.n:
            return base.Ok()
        return base.Ok(Payload(self.store.rows(asked.layer, asked.pos0, asked.n)[asked.which]))

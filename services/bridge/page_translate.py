"""Bus messages about held pages to frames of the attention channel and back; and what an answer must look like. Pure.

Used by services.bridge.page_pump and page_errands.
"""

from __future__ import annotations

import numpy as np

from common.errors import LocalProtocolError, OutriggerError, RemoteProtocolError
from common.limits import FRAME_BYTES_MAX, MIB
from common.wire import attention_base_frames as base
from common.wire import attention_extension_frames as ext
from common.wire import held as h
from common.wire.base_frames import DTYPE_F32
from common.wire.extension_frames import EXTENSION_VERSION, FEATURE_F32_PARTIALS, LSE_BASE_NATURAL
from common.wire.fingerprint import fingerprint
from common.wire.frames import Frame
from common.wire.layout import Payload
from services.bridge.translate import cause_of

F32_BYTES = 4
QUERY_WINDOW = 8
"""Queries and pieces of pages that this side lets be unanswered."""


def greeting(boot_id: int) -> ext.Hello3:
    """HELLO3 of the attention channel; whose pages they are, each CONFIG2 says."""
    return ext.Hello3(
        ext_min=EXTENSION_VERSION,
        ext_max=EXTENSION_VERSION,
        boot_id=boot_id,
        features=FEATURE_F32_PARTIALS,
        lse_base=LSE_BASE_NATURAL,
        kv_type=ext.KV_TYPE_F16,
        page_tokens=0,
        group_pages=0,
        frame_mib_max=FRAME_BYTES_MAX // MIB,
        window=QUERY_WINDOW,
        split_layer=0,
        n_layer_full=0,
        n_embd=0,
        n_vocab=0,
        n_ctx=0,
        device="",
        fingerprint=fingerprint(""),
        text="",
    )


def check_greeting(answer: ext.Hello3Ok) -> None:
    """Raises RemoteProtocolError for a worker whose accumulators we could not fold."""
    if answer.lse_base != LSE_BASE_NATURAL or not answer.features & FEATURE_F32_PARTIALS:
        raise RemoteProtocolError(
            f"the worker's accumulators are not ours (base {answer.lse_base}, features {answer.features}): run the "
            f"same version of outrigger on both"
        )


def config2(asked: h.HoldPages) -> ext.Config2:
    """Make room for pages of this form."""
    form = asked.form
    return ext.Config2(
        n_layer=len(form.layers),
        n_head_kv=form.n_head_kv,
        n_group=form.n_group,
        head_dim_k=form.head_dim,
        head_dim_v=form.head_dim,
        kv_type=ext.KV_TYPE_F16,
        page_tokens=form.page_tokens,
        group_pages=form.group_pages,
        many_rows=ext.MANY_ROWS.index(form.many_rows),
        bytes_wanted=asked.bytes_wanted,
        session=asked.session,
        keep=int(asked.session != 0),
        layers=Payload(np.array(form.layers, "<u4")),
    )


def attn2(asked: h.Attend, form: h.PageForm, q: memoryview) -> ext.Attn2:
    """The query as the worker hears it. Raises LocalProtocolError when it is not one for pages of this form."""
    wanted = (form.n_head_kv, form.n_group * asked.n_tokens, form.head_dim)
    if (asked.n_head_kv, asked.n_rows, asked.head_dim) != wanted:
        raise LocalProtocolError(
            f"queries are {[asked.n_head_kv, asked.n_rows, asked.head_dim]}; the pages want {list(wanted)}"
        )
    return ext.Attn2(
        asked.layer,
        asked.n_tokens,
        asked.group_first,
        asked.group_end,
        int(asked.per_group),
        asked.scale,
        DTYPE_F32,
        Payload(q),
    )


def attended(
    asked: h.Attend, answer: ext.Attn2Ok, form: h.PageForm, round_trip_s: float
) -> tuple[h.Attended, tuple[memoryview, ...]]:
    """The accumulators as the mac process hears them, uncopied. Raises RemoteProtocolError for a wrong shape."""
    n_groups = asked.group_end - asked.group_first
    n_parts, n_keys = n_groups if asked.per_group else 1, n_groups * form.group_tokens
    n = F32_BYTES * n_parts * asked.n_head_kv * asked.n_rows
    expected = n * (2 + asked.head_dim)
    if (answer.n_parts, answer.n_keys, answer.parts.n_bytes) != (n_parts, n_keys, expected):
        raise RemoteProtocolError(
            f"the worker answered {answer.n_parts} parts of {answer.n_keys} keys in {answer.parts.n_bytes} bytes; "
            f"asked were {n_parts} of {n_keys}, which have {expected}"
        )
    message = h.Attended(
        epoch=asked.epoch,
        ticket=asked.ticket,
        n_parts=n_parts,
        n_keys=n_keys,
        n_keys_frozen=answer.n_keys_frozen,
        n_head_kv=asked.n_head_kv,
        n_rows=asked.n_rows,
        head_dim=asked.head_dim,
        total_ms=answer.total_ms,
        frozen_ms=answer.frozen_ms,
        generic_ms=answer.generic_ms,
        queue_ms=answer.queue_ms,
        round_trip_ms=1000 * round_trip_s,
    )
    parts = answer.parts.joined()
    return message, (parts[:n], parts[n : 2 * n], parts[2 * n :])


def attend_failed(asked: h.Attend, error: OutriggerError) -> h.AttendFailed:
    """The answer to a query that the worker will not answer."""
    return h.AttendFailed(asked.epoch, asked.ticket, error.code, cause_of(error), str(error)[:2000])


def push_failed(ticket: int, epoch: int, error: OutriggerError) -> h.PushFailed:
    """The answer to a request of the broker's that was not carried out."""
    return h.PushFailed(ticket, epoch, error.code, cause_of(error), str(error)[:2000])


QUERY_TYPES = (ext.Attn2.TYPE, ext.Attn2Ok.TYPE)
PAGE_TYPES = (ext.Append2.TYPE, ext.Fetch2.TYPE)


def byte_kind(frame_type: int) -> str:
    """Label of link_bytes_total for a frame of the attention channel."""
    if frame_type in QUERY_TYPES:
        return "queries"
    return "pages" if frame_type in PAGE_TYPES else "control"


def ping() -> Frame:
    """An empty request, so that the worker hears of us."""
    return base.Ping(0)

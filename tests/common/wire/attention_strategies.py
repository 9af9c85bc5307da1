"""Hypothesis strategies for every frame of the attention channel, as strategies.py has them for the residual one."""

from __future__ import annotations

import numpy as np
from hypothesis import strategies as st

from common.limits import N_CTX_MAX
from common.wire import attention_base_frames as base
from common.wire import attention_extension_frames as ext
from common.wire.frames import ATTENTION, Frame
from common.wire.layout import Payload
from tests.common.wire.strategies import hello3, milliseconds, names, payloads, u32, u64

layers = st.integers(0, 511)
positions = st.integers(0, N_CTX_MAX)
scales = st.floats(0, 100, width=32)


@st.composite
def _config(draw) -> dict:
    n_head, head_bytes = draw(st.integers(0, 16)), draw(st.integers(0, 512))
    fields = {name: draw(u32) for name in ("kv_type", "sme_workers", "gpu_permille", "store_f16")}
    return fields | {
        "n_layer": draw(st.integers(0, 512)), "n_head_kv": n_head, "head_bytes": head_bytes,
        "row_bytes": n_head * head_bytes,
    }  # fmt: skip


@st.composite
def _append(draw) -> dict:
    n, row_bytes = draw(st.integers(1, 5)), draw(st.integers(0, 9))
    rows = draw(st.binary(min_size=2 * n * row_bytes, max_size=2 * n * row_bytes))
    return {"layer": draw(layers), "pos0": draw(positions), "n": n, "rows": Payload(rows)}


@st.composite
def _config2(draw) -> dict:
    numbers = sorted(draw(st.sets(layers, min_size=1, max_size=6)))
    page_tokens = 64 * draw(st.integers(1, 64))
    small = st.integers(1, 300)
    return {
        "n_layer": len(numbers), "n_head_kv": draw(small), "n_group": draw(small), "head_dim_k": draw(small),
        "head_dim_v": draw(small), "kv_type": draw(u32), "page_tokens": page_tokens,
        "group_pages": draw(st.integers(1, 8)), "many_rows": draw(st.integers(0, 1)), "bytes_wanted": draw(u64),
        "session": draw(u64), "keep": draw(u32), "layers": Payload(np.array(numbers, "<u4")),
    }  # fmt: skip


@st.composite
def _attn2(draw) -> dict:
    first = draw(st.integers(0, 1000))
    return {
        "layer": draw(layers), "n_tok": draw(st.integers(1, 1024)), "group_first": first,
        "group_end": first + draw(st.integers(1, 9)), "per_group": draw(st.integers(0, 1)), "scale": draw(scales),
        "q_dtype": draw(st.integers(0, 1)), "q": draw(payloads),
    }  # fmt: skip


@st.composite
def _attn2_ok(draw) -> dict:
    n_parts, n_keys = draw(st.integers(1, 4)), draw(positions)
    fields = {name: draw(milliseconds) for name in ("total_ms", "frozen_ms", "generic_ms", "queue_ms")}
    return fields | {
        "answers": draw(u64), "n_parts": n_parts, "n_keys": n_keys,
        "n_keys_frozen": draw(st.integers(0, n_keys)), "parts": Payload(bytes(4 * n_parts * draw(st.integers(0, 9)))),
    }  # fmt: skip


def _query(n_tok_max: int) -> st.SearchStrategy[dict]:
    fields = {
        "layer": layers, "n_tok": st.integers(1, n_tok_max), "nk": positions, "scale": scales, "q": payloads,
    }  # fmt: skip
    return st.fixed_dictionaries(fields)


@st.composite
def _config2_ok(draw) -> dict:
    tokens_max = draw(positions)
    n_keys = draw(st.integers(0, tokens_max))
    return {
        "answers": draw(u64),
        "bytes_granted": draw(u64),
        "tokens_max": tokens_max,
        "n_keys": n_keys,
    }


attn_ok = {
    "nk": positions, "total_ms": milliseconds, "gpu_ms": milliseconds, "cpu_ms": milliseconds, "gpu_pages": u32,
    "pages": u32, "output": payloads,
}  # fmt: skip
piece = {
    "layer": layers, "page": positions, "n": positions, "offset": u32, "image_xxh3": u64, "piece": payloads,
}  # fmt: skip
fetch = {"layer": layers, "pos0": positions, "n": positions, "which": st.integers(0, 1)}
FIELDS: dict[type[Frame], st.SearchStrategy] = {
    base.Hello: st.just({}),
    base.HelloOk: st.fixed_dictionaries({"version": u32, "sme2": u32, "device": names}),
    base.Config: _config(),
    base.Append: _append(),
    base.Truncate: st.fixed_dictionaries({"n": u32}),
    base.Attn: _query(8),
    base.AttnBig: _query(512),
    base.AttnOk: st.fixed_dictionaries(attn_ok),
    base.Stats: st.just({}),
    base.Ok: st.fixed_dictionaries({"data": payloads}),
    base.Err: st.fixed_dictionaries({"text": st.text(max_size=60)}),
    base.Bye: st.just({}),
    base.Ping: st.fixed_dictionaries({"reply_len": st.integers(0, 1 << 26), "data": payloads}),
    base.Fetch: st.fixed_dictionaries(fetch),
    ext.Hello3: hello3(),
    ext.Hello3Ok: hello3(),
    ext.Config2: _config2(),
    ext.Config2Ok: _config2_ok(),
    ext.Append2: st.fixed_dictionaries(piece),
    ext.Ok2: st.fixed_dictionaries({"answers": u64, "n_now": positions, "data": payloads}),
    ext.Attn2: _attn2(),
    ext.Attn2Ok: _attn2_ok(),
    ext.Truncate2: st.fixed_dictionaries({"n": positions}),
    ext.Fetch2: st.fixed_dictionaries({"layer": layers, "page": positions}),
    ext.Err2: st.fixed_dictionaries(
        {"answers": u64, "code": u32, "n_valid": positions, "text": st.text(max_size=60)}
    ),
}


def attention_frames(cls: type[Frame] | None = None) -> st.SearchStrategy[Frame]:
    """Random frames of one class, or of all classes of the attention channel."""
    if cls is not None:
        return FIELDS[cls].map(lambda values: cls(**values))
    return st.one_of([attention_frames(known) for classes in ATTENTION.frames.values() for known in classes])

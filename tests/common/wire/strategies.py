"""Hypothesis strategies for every frame of the residual channel: random values within the bounds the codec states."""

from __future__ import annotations

from hypothesis import strategies as st

from common.limits import CHUNK_WINDOW_MAX, N_CTX_MAX, N_LAYER_MAX
from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire import rows
from common.wire.fingerprint import fingerprint
from common.wire.frames import RESIDUAL, Frame
from common.wire.layout import Payload

u32 = st.integers(0, 2**32 - 1)
u64 = st.integers(0, 2**64 - 1)
milliseconds = st.floats(0, 1e6, width=32)
payloads = st.lists(st.binary(max_size=60), max_size=3).map(lambda parts: Payload(*parts))
cuts = st.lists(st.integers(1, 70) | st.just(1 << 20), min_size=1, max_size=8)
names = st.text(max_size=20).filter(lambda text: "\0" not in text and len(text.encode()) <= 60)


@st.composite
def _model(draw) -> dict[str, int]:
    n_layer_full = draw(st.integers(0, 64))
    first = draw(st.integers(0, n_layer_full))
    return {
        "split_layer": first,
        "n_layer_full": n_layer_full,
        "n_embd": draw(st.integers(0, 8192)),
        "n_vocab": draw(st.integers(0, 300_000)),
        "n_ctx": draw(st.integers(0, N_CTX_MAX)),
    }


@st.composite
def _hello(draw) -> dict:
    return _with(draw, {"proto": u32, "state_format": u32, "n_ubatch": u32}) | draw(_model())


@st.composite
def _hello2(draw) -> dict:
    i32 = st.integers(-(2**31), 2**31 - 1)
    more = {
        "type_k": i32,
        "type_v": i32,
        "flash_attn": u32,
        "n_rs_replay": u32,
        "n_taps": st.integers(0, 4),
        "taps": st.tuples(i32, i32, i32, i32),
        "session": u64,
        "keep": u32,
    }
    return draw(_hello()) | _with(draw, more)


@st.composite
def _hello_ok(draw) -> dict:
    model = draw(_model())
    model["layer_start"] = model.pop("split_layer")
    more = {"proto": u32, "state_format": u32, "n_layer": u32, "file_bytes": u64, "desc": names}
    return model | _with(draw, more)


@st.composite
def _hello_ok2(draw) -> dict:
    return draw(_hello_ok()) | _with(draw, {"n_valid": u32, "session": u64})


@st.composite
def hello3(draw) -> dict:
    text = draw(st.text(max_size=200))
    low = draw(st.integers(0, 9))
    more = {
        "boot_id": u64,
        "features": u32,
        "lse_base": u32,
        "kv_type": u32,
        "page_tokens": u32,
        "group_pages": u32,
        "frame_mib_max": u32,
        "window": st.integers(1, CHUNK_WINDOW_MAX),
        "device": names,
    }
    fixed = {"ext_min": low, "ext_max": low + 1, "text": text, "fingerprint": fingerprint(text)}
    return draw(_model()) | _with(draw, more) | fixed


@st.composite
def _chunk(draw) -> dict:
    n_tok, dtype, n_embd = draw(st.integers(1, 5)), draw(st.integers(0, 1)), draw(st.integers(0, 8))
    n_bytes = n_tok * n_embd * base.DTYPE_BYTES[dtype]
    data = draw(st.binary(min_size=n_bytes, max_size=n_bytes))
    pos0 = draw(st.integers(0, N_CTX_MAX))
    want = draw(st.integers(0, 15))
    return {"pos0": pos0, "n_tok": n_tok, "dtype": dtype, "want": want, "residual": Payload(data)}


@st.composite
def _chunk_ack(draw) -> dict:
    n_logits = draw(st.integers(0, 6))
    rest = draw(st.binary(max_size=30))
    output = Payload(bytes(range(4 * n_logits)), rest)
    return {
        "status": draw(u32),
        "n_tok": draw(st.integers(0, 4096)),
        "n_logits": n_logits,
        "compute_ms": draw(milliseconds),
        "output": output,
    }


@st.composite
def _chunk2_ack(draw) -> dict:
    values = draw(_chunk_ack())
    del values["status"]
    more = {"answers": u64, "n_valid": st.integers(0, N_CTX_MAX), "queue_ms": milliseconds, "reserved": u32}
    return values | _with(draw, more)


@st.composite
def _range(draw) -> dict:
    p1 = draw(st.integers(0, N_CTX_MAX))
    return {"p0": draw(st.integers(0, p1)), "p1": p1, "flags": draw(st.integers(0, 3))}


def _with(draw, strategies: dict) -> dict:
    return {name: draw(strategy) for name, strategy in strategies.items()}


positions = st.integers(0, N_CTX_MAX)
sync = st.fixed_dictionaries({"flags": st.integers(0, 3), "n_valid_after": positions, "blob": payloads})
FIELDS: dict[type[Frame], st.SearchStrategy] = {
    base.Hello: _hello(),
    base.Hello2: _hello2(),
    base.HelloOk: _hello_ok(),
    base.HelloOk2: _hello_ok2(),
    base.Reset: st.just({}),
    base.ResetOk: st.just({}),
    base.Chunk: _chunk(),
    base.ChunkAck: _chunk_ack(),
    base.Trim: st.fixed_dictionaries({"n": u32}),
    base.Sync: sync,
    base.Ok: st.fixed_dictionaries({"n_valid": u32}),
    base.State: st.just({}),
    base.StateRange: _range(),
    base.StateData: st.fixed_dictionaries({"blob": payloads}),
    base.Ping: st.fixed_dictionaries({"reply_len": st.integers(0, 1 << 26), "data": payloads}),
    base.Pong: st.fixed_dictionaries({"data": payloads}),
    base.Bye: st.just({}),
    base.Err: st.fixed_dictionaries({"text": st.text(max_size=60)}),
    ext.Hello3: hello3(),
    ext.Hello3Ok: hello3(),
    ext.Chunk2: _chunk(),
    ext.Chunk2Ack: _chunk2_ack(),
    ext.Sync2: sync,
    ext.Ok2: st.fixed_dictionaries({"answers": u64, "n_valid": positions}),
    ext.StateRange2: _range(),
    ext.StateData2: st.fixed_dictionaries({"answers": u64, "blob": payloads}),
    ext.Snapshot: st.fixed_dictionaries({"n": positions}),
    ext.Trim2: st.fixed_dictionaries({"n": positions}),
    ext.Err2: st.fixed_dictionaries(
        {"answers": u64, "code": u32, "n_valid": positions, "text": st.text(max_size=60)}
    ),
}


def frames(cls: type[Frame] | None = None) -> st.SearchStrategy[Frame]:
    """Random frames of one class, or of all classes of the residual channel."""
    if cls is not None:
        return FIELDS[cls].map(lambda values: cls(**values))
    return st.one_of([frames(known) for classes in RESIDUAL.frames.values() for known in classes])


@st.composite
def row_sections(draw) -> list[rows.RowSection]:
    """A few sections of a ROWS blob, of all kinds."""
    sections = []
    for _ in range(draw(st.integers(0, 4))):
        kind = draw(st.integers(0, 3))
        p0 = draw(st.integers(0, 1000))
        p1 = p0 + (draw(st.integers(0, 4)) if kind < rows.KIND_CONV else 0)
        row_bytes = draw(st.integers(0, 9))
        n_rows = p1 - p0 if kind < rows.KIND_CONV else 1
        n_bytes = n_rows * row_bytes
        data = draw(st.binary(min_size=n_bytes, max_size=n_bytes))
        layer = draw(st.integers(0, N_LAYER_MAX - 1))
        sections.append(rows.RowSection(layer, kind, draw(st.integers(0, 63)), p0, p1, row_bytes, data))
    return sections

"""The grammar of the attention channel: who may say what when, and what answers what. Tables, and nothing else.

docs/protocol.md prints them and tests/contract/test_protocol.py compares.
"""

from __future__ import annotations

from common.wire import attention_base_frames as base
from common.wire import attention_extension_frames as ext
from common.wire.frames import ATTENTION, Frame
from common.wire.grammar import Phase, Role, Rules

H, W = Role.HOST, Role.WORKER

BASE_ANSWERS: dict[type[Frame], type[Frame]] = {
    base.Config: base.Ok,
    base.Append: base.Ok,
    base.Truncate: base.Ok,
    base.Attn: base.AttnOk,
    base.AttnBig: base.AttnOk,
    base.Stats: base.Ok,
    base.Ping: base.Ok,
    base.Fetch: base.Ok,
}
EXTENSION_ANSWERS: dict[type[Frame], type[Frame]] = {
    ext.Config2: ext.Config2Ok,
    ext.Append2: ext.Ok2,
    ext.Attn2: ext.Attn2Ok,
    ext.Truncate2: ext.Ok2,
    ext.Fetch2: ext.Ok2,
}

GRAMMAR: dict[Phase, dict[tuple[Role, type[Frame]], Phase]] = {
    Phase.OPEN: {
        (H, base.Hello): Phase.GREETED_BASE,
        (H, ext.Hello3): Phase.GREETED,
        (W, base.Err): Phase.CLOSED,
        (W, ext.Err2): Phase.CLOSED,
    },
    Phase.GREETED_BASE: {(W, base.HelloOk): Phase.BASE, (W, base.Err): Phase.CLOSED},
    Phase.GREETED: {
        (W, ext.Hello3Ok): Phase.EXTENDED,
        (W, ext.Err2): Phase.CLOSED,
        (W, base.Err): Phase.CLOSED,
    },
    Phase.BASE: {(H, cls): Phase.BASE for cls in BASE_ANSWERS}
    | {(W, cls): Phase.BASE for cls in (base.Ok, base.AttnOk, base.Err)}
    | {(role, base.Bye): Phase.CLOSED for role in Role},
    Phase.EXTENDED: {(H, cls): Phase.EXTENDED for cls in (*EXTENSION_ANSWERS, base.Ping)}
    | {(W, cls): Phase.EXTENDED for cls in (ext.Config2Ok, ext.Ok2, ext.Attn2Ok, ext.Err2, base.Ok)}
    | {(role, base.Bye): Phase.CLOSED for role in Role},
    Phase.CLOSED: {},
}

ATTENTION_RULES = Rules(
    channel=ATTENTION,
    grammar=GRAMMAR,
    answers=BASE_ANSWERS | EXTENSION_ANSWERS,
    pipelined=(ext.Append2, ext.Attn2),
    mixed=True,
    overtaking={},
    hello3=(ext.Hello3, ext.Hello3Ok),
    ping=(),
    bye=base.Bye,
    err=base.Err,
    err2=ext.Err2,
)

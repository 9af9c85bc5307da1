"""The grammar of the residual channel: who may say what when, and what answers what. Tables, and nothing else.

`link` walks them; docs/protocol.md prints them and tests/contract/test_protocol.py compares. `Rules` is what a channel
has of such tables; the attention channel's are in `attention_grammar`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from common.wire import base_frames as base
from common.wire import extension_frames as ext
from common.wire.frames import RESIDUAL, Channel, Frame


class Role(enum.Enum):
    HOST = "host"
    WORKER = "worker"

    __hash__ = (
        object.__hash__
    )  # members are compared by identity; Enum's own is Python code, met with every frame

    @property
    def other(self) -> Role:
        return Role.WORKER if self is Role.HOST else Role.HOST


class Phase(enum.Enum):
    """What was said so far. OPEN nothing; GREETED a hello; BASE and EXTENDED: both greeted; CLOSED: goodbye."""

    OPEN = "open"
    GREETED_BASE = "greeted (base)"
    GREETED = "greeted"
    BASE = "base"
    EXTENDED = "extended"
    CLOSED = "closed"

    __hash__ = object.__hash__


H, W = Role.HOST, Role.WORKER
GRAMMAR: dict[Phase, dict[tuple[Role, type[Frame]], Phase]] = {
    Phase.OPEN: {
        (H, base.Hello): Phase.GREETED_BASE,
        (H, base.Hello2): Phase.GREETED_BASE,
        (H, ext.Hello3): Phase.GREETED,
        (W, base.Err): Phase.CLOSED,
        (W, ext.Err2): Phase.CLOSED,
    },
    Phase.GREETED_BASE: {
        (W, base.HelloOk): Phase.BASE,
        (W, base.HelloOk2): Phase.BASE,
        (W, base.Err): Phase.CLOSED,
    },
    Phase.GREETED: {
        (W, ext.Hello3Ok): Phase.EXTENDED,
        (W, ext.Err2): Phase.CLOSED,
        (W, base.Err): Phase.CLOSED,
    },
    Phase.BASE: {
        (H, cls): Phase.BASE for cls in (base.Reset, base.Chunk, base.Trim, base.Sync, base.StateRange)
    }
    | {(W, cls): Phase.BASE for cls in (base.ResetOk, base.ChunkAck, base.Ok, base.StateData, base.Err)}
    | {(H, base.State): Phase.BASE, (H, base.Ping): Phase.BASE, (W, base.Pong): Phase.BASE}
    | {(H, base.Bye): Phase.CLOSED, (W, base.Bye): Phase.CLOSED},
    Phase.EXTENDED: {
        (H, cls): Phase.EXTENDED for cls in (ext.Chunk2, ext.Sync2, ext.StateRange2, ext.Snapshot, ext.Trim2)
    }
    | {(W, cls): Phase.EXTENDED for cls in (ext.Chunk2Ack, ext.Ok2, ext.StateData2, ext.Err2)}
    | {(role, cls): Phase.EXTENDED for role in Role for cls in (base.Ping, base.Pong)}
    | {(role, base.Bye): Phase.CLOSED for role in Role},
    Phase.CLOSED: {},
}
"""GRAMMAR[phase][who, what] is the phase that follows; what is not here may not be said."""

ANSWERS: dict[type[Frame], type[Frame]] = {
    base.Reset: base.ResetOk,
    base.Chunk: base.ChunkAck,
    base.Trim: base.Ok,
    base.Sync: base.Ok,
    base.StateRange: base.StateData,
    base.State: base.StateData,
    ext.Chunk2: ext.Chunk2Ack,
    ext.Sync2: ext.Ok2,
    ext.StateRange2: ext.StateData2,
    ext.Snapshot: ext.Ok2,
    ext.Trim2: ext.Ok2,
}
"""Every request is answered once, in order, by this or by ERR / ERR2."""

PIPELINED = (base.Chunk, ext.Chunk2)
"""Of these, up to `window` may be unanswered; any other request waits until nothing is, save for OVERTAKING."""

OVERTAKING: dict[type[Frame], type[Frame]] = {ext.Trim2: ext.Chunk2}
"""A request that may be said while others are unanswered: chunks behind the point a TRIM2 goes back to need not be run
any more. Answers still come in order."""


@dataclass(frozen=True, eq=False)
class Rules:
    """A channel's grammar, and those of its frames that a link looks at itself."""

    channel: Channel
    grammar: dict[Phase, dict[tuple[Role, type[Frame]], Phase]]
    answers: dict[type[Frame], type[Frame]]
    pipelined: tuple[type[Frame], ...]
    mixed: bool
    """Whether those of `pipelined` may be unanswered beside each other."""
    overtaking: dict[type[Frame], type[Frame]]
    hello3: tuple[type[Frame], type[Frame]]
    """The extension's greeting and its answer."""
    ping: tuple[type[Frame], ...]
    """PING and PONG, where they are no request and answer like others."""
    bye: type[Frame]
    err: Any
    err2: Any
    """Frame classes too, which begin with the same fields on every channel."""

    @cached_property
    def answering(self) -> frozenset[type[Frame]]:
        """What may answer a request, failures included."""
        return frozenset((*self.answers.values(), self.err, self.err2))

    @cached_property
    def allowed_types(self) -> dict[tuple[Phase, Role], frozenset[int]]:
        """Frame types that a role may say in a phase."""
        return {
            (phase, role): frozenset(what.TYPE for who, what in self.grammar[phase] if who is role)
            for phase in Phase
            for role in Role
        }


RESIDUAL_RULES = Rules(
    channel=RESIDUAL,
    grammar=GRAMMAR,
    answers=ANSWERS,
    pipelined=PIPELINED,
    mixed=False,
    overtaking=OVERTAKING,
    hello3=(ext.Hello3, ext.Hello3Ok),
    ping=(base.Ping, base.Pong),
    bye=base.Bye,
    err=base.Err,
    err2=ext.Err2,
)

"""Every message of the bus, grouped by route. Commands are imperative, events past.

Typed and frozen (msgspec, msgpack). Arrays never travel inside a message: they follow as frames of their own, and
`frame_bytes` says how long each must be, so that a receiver can refuse a wrong one before it looks at it.
`common.wire.routes` says who says what to whom; `common.wire.codec` turns messages into frames and back.
"""

from __future__ import annotations

from typing import Literal

from common.wire.frozen import FrozenReport

# --- route "generate": gateway -> mac and back -----------------------------------------------------------------------
from common.wire.generate import (  # noqa: F401 (declared there, used as messages.X)
    AskStatus,
    Cancel,
    ChoiceFinished,
    Failed,
    Finished,
    Generate,
    GrantTokens,
    HostStatus,
    PrefillAdvanced,
    Queued,
    ReadReport,
    Sampling,
    TokenLogprobs,
    TokenReady,
    UbatchTimes,
    WorkerView,
)
from common.wire.message import Message, Part

# --- route "link": mac -> bridge and back (control) ------------------------------------------------------------------


class LinkHello(Part, frozen=True):
    """One side's half of HELLO3 on the residual channel (see docs/protocol.md)."""

    split_layer: int
    n_layer_full: int
    n_embd: int
    n_vocab: int
    n_ctx: int
    kv_type: int
    """ggml type of the KV rows (1 = f16)."""
    fingerprint_text: str
    window: int = 2
    page_tokens: int = 4096
    group_pages: int = 4
    device: str = ""
    output: bool = False
    """The host has no output head: the worker gives the logits, and the text covers its head, too."""


class AttachWorker(Message, frozen=True):
    """Open the residual channel for this model and keep it open. Replaces an earlier one."""

    hello: LinkHello


class DetachWorker(Message, frozen=True):
    """Close the channel; do not reconnect."""


class LinkUp(Message, frozen=True):
    """The worker accepted. `link_epoch` names this life of the link; everything sent carries it."""

    link_epoch: int
    hello: LinkHello
    rtt_us: float
    token_ms: float = 0.0
    """Milliseconds a token of one full chunk on the worker, measured when the link came up; 0: not measured."""


class LinkDown(Message, frozen=True):
    """The link is down. `final` means that trying again is useless until somebody changes something."""

    link_epoch: int
    cause: str
    detail: str
    final: bool


class WorkerReported(Message, frozen=True):
    """Memory, heat and state of the worker, from its control channel."""

    thermal: int
    avail_mb: int
    state: str
    frozen: FrozenReport | None = None
    """What its frozen pages do, when it has any; only now and then."""


class ShowPhase(Message, frozen=True):
    """What the worker's screen should say the host does."""

    phase: Literal["starting", "ready", "reading", "thinking", "writing", "done", "stopped"]
    n1: int = 0
    n2: int = 0
    n_ctx: int = 0


# --- route "residual": mac -> bridge and back (data) -----------------------------------------------------------------

WANT_LOGITS = 1
WANT_TAPS = 2
WANT_ROWS = 4
"""The ack of this chunk carries the K/V rows it wrote (ROWS blob)."""
WANT_STATE = 8
"""The ack also carries the recurrent state after this chunk."""

ROWS_KV = 1
ROWS_STATE = 2


class RunChunk(Message, frozen=True):
    """Run the tail over one ubatch. Frame: residual f32 [n_tokens, n_embd]."""

    link_epoch: int
    ticket: int
    position: int
    n_tokens: int
    n_embd: int
    want: int

    @property
    def frame_bytes(self) -> tuple[int, ...]:
        return (4 * self.n_tokens * self.n_embd,)


class ChunkDone(Message, frozen=True):
    """The tail ran. Frames: ROWS blob of `blob_bytes` (0 when no rows were wanted); logits f32 [n_logits], if any."""

    link_epoch: int
    ticket: int
    n_tokens: int
    compute_ms: float
    queue_ms: float
    round_trip_ms: float
    """Send of the chunk's first byte to its ack, on the bridge's clock."""
    blob_bytes: int
    n_logits: int = 0
    """Of the chunk's last row, when they were wanted: the size of the vocabulary."""

    @property
    def frame_bytes(self) -> tuple[int, ...]:
        return (self.blob_bytes, 4 * self.n_logits) if self.n_logits else (self.blob_bytes,)


class PushRows(Message, frozen=True):
    """Give the worker's mirror rows or state it lacks (SYNC2). Frame: ROWS blob."""

    link_epoch: int
    ticket: int
    flags: int
    n_valid_after: int
    blob_bytes: int

    @property
    def frame_bytes(self) -> tuple[int, ...]:
        return (self.blob_bytes,)


class PullRows(Message, frozen=True):
    """Ask for the worker's rows [p0, p1) and/or its recurrent state (STATE_RANGE2)."""

    link_epoch: int
    ticket: int
    p0: int
    p1: int
    flags: int


class RowsPulled(Message, frozen=True):
    """Answer to PullRows. Frame: ROWS blob."""

    link_epoch: int
    ticket: int
    blob_bytes: int

    @property
    def frame_bytes(self) -> tuple[int, ...]:
        return (self.blob_bytes,)


class TakeSnapshot(Message, frozen=True):
    """Keep the mirror's recurrent state at n_valid = n: with split decode no state comes home that would be kept."""

    link_epoch: int
    ticket: int
    n: int


class RewindMirror(Message, frozen=True):
    """Rewind the mirror to the newest point <= n it can go back to (0 empties it)."""

    link_epoch: int
    ticket: int
    n: int


class MirrorAt(Message, frozen=True):
    """Answer to PushRows, TakeSnapshot and RewindMirror: positions [0, n_valid) are valid in the mirror."""

    link_epoch: int
    ticket: int
    n_valid: int


class LinkFailed(Message, frozen=True):
    """The operation with this ticket will not be answered; the link is down or the worker refused."""

    link_epoch: int
    ticket: int
    code: int
    cause: str
    detail: str


# --- route "life": every process -> launch and back -------------------------------------------------------------------


class StateChanged(Message, frozen=True):
    """A process moved on: starting -> ready -> serving -> draining -> stopped."""

    process: str
    pid: int
    state: Literal["starting", "ready", "serving", "draining", "stopped"]
    detail: str = ""
    listens: dict[str, str] = {}
    """Where the process listens, by purpose: {"metrics": "http://127.0.0.1:9571/metrics"}."""


class Beat(Message, frozen=True):
    """Sign of life; `work` grows only when the thread that does the work took a turn (0: there is no such thread)."""

    process: str
    pid: int
    work: int


class AskLaunch(Message, frozen=True):
    """Ask for a LaunchStatus."""


class ProcessStatus(Part, frozen=True):
    """How one process is, as whoever started it knows."""

    process: str
    state: str
    """Its own word (starting, ready, serving, draining, stopped), or what befell it: silent, stuck, backoff, failed."""
    pid: int
    """0: it does not run."""
    uptime_s: float
    restarts: int
    detail: str = ""
    """What it does now, or when it is tried again."""
    last_error: str = ""
    """Why its last life ended, in one line."""
    last_error_s: float = 0.0
    """Seconds since then."""
    listens: dict[str, str] = {}


class LaunchStatus(Message, frozen=True):
    """How all processes of a run are."""

    pid: int
    state: Literal["starting", "serving", "stopping"]
    model: str
    http: str
    """Base of the API; empty until somebody listens."""
    uptime_s: float
    processes: tuple[ProcessStatus, ...]


GatewayToMac = Generate | GrantTokens | Cancel | AskStatus
MacToGateway = Queued | PrefillAdvanced | TokenReady | ChoiceFinished | Finished | Failed | HostStatus
MacToBridge = AttachWorker | DetachWorker | ShowPhase
BridgeToMac = LinkUp | LinkDown | WorkerReported
MacToBridgeData = RunChunk | PushRows | PullRows | TakeSnapshot | RewindMirror
BridgeToMacData = ChunkDone | RowsPulled | MirrorAt | LinkFailed
ToLaunch = StateChanged | Beat | AskLaunch
FromLaunch = StateChanged | LaunchStatus

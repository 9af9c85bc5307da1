"""Every message of the bus, grouped by route. Commands are imperative, events past.

Typed and frozen (msgspec, msgpack). Arrays never travel inside a message: they follow as frames of their own, and
`frame_bytes` says how long each must be, so that a receiver can refuse a wrong one before it looks at it.
`common.wire.routes` says who says what to whom; `common.wire.codec` turns messages into frames and back.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Root of all bus messages. `frame_bytes` is the length of every array frame that follows the message."""

    @property
    def frame_bytes(self) -> tuple[int, ...]:
        """Bytes of each trailing array frame, in order. Most messages have none."""
        return ()


class Part(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A piece of a message; has no tag of its own."""


# --- route "generate": gateway -> mac and back -----------------------------------------------------------------------


class Sampling(Part, frozen=True):
    """How the next token is chosen. temperature 0 is greedy. Names and meanings are llama.cpp's samplers'."""

    temperature: float = 0.0
    top_k: int = 40
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repeat_penalty: float = 1.0
    seed: int = 0


class Generate(Message, frozen=True):
    """Read a prompt and write up to max_tokens tokens. Frame: token ids i32 [n_tokens]."""

    request_id: str
    n_tokens: int
    max_tokens: int
    sampling: Sampling
    stop_token_ids: tuple[int, ...]
    deadline_s: float
    """Seconds from arrival after which the host gives the request up (E602)."""
    credit: int
    """Tokens the host may send before it has to wait for a GrantTokens."""

    @property
    def frame_bytes(self) -> tuple[int, ...]:
        return (4 * self.n_tokens,)


class GrantTokens(Message, frozen=True):
    """The gateway takes `credit` more tokens of this request."""

    request_id: str
    credit: int


class Cancel(Message, frozen=True):
    """Stop this request within one ubatch; cancelling a waiting request never touches the running one."""

    request_id: str


class AskStatus(Message, frozen=True):
    """Ask the host for a HostStatus."""


class Queued(Message, frozen=True):
    """The request waits; `ahead` requests come first (0: it runs now)."""

    request_id: str
    ahead: int


class PrefillAdvanced(Message, frozen=True):
    """One more ubatch of the prompt is through all layers."""

    request_id: str
    tokens_done: int
    tokens_total: int


class TokenReady(Message, frozen=True):
    """One generated token; index counts from 0 without gaps."""

    request_id: str
    index: int
    token_id: int


class UbatchTimes(Part, frozen=True):
    """Where the time of one ubatch of a read went. Seconds; the `at` values count from the start of the read."""

    position: int
    n_tokens: int
    head_at_s: float
    head_s: float
    """Layers before the split on the host; all layers when the ubatch ran on the host alone."""
    worker_s: float = 0.0
    """The tail's computing time, as the worker reports it; 0 when it did not take part."""
    round_trip_s: float = 0.0
    ack_at_s: float = 0.0
    """When the host took the worker's answer."""
    import_s: float = 0.0
    """Taking the worker's rows over into the host's own tail layers."""
    tail_at_s: float = 0.0
    tail_s: float = 0.0
    """Tail layers on the host (the last ubatch of a split read)."""


class ReadReport(Part, frozen=True):
    """Where the prompt's tokens were computed and how long it took."""

    tokens_cache: int = 0
    tokens_host: int = 0
    """Tokens of ubatches that ran on the host alone."""
    tokens_worker: int = 0
    """Tokens whose tail layers the worker ran."""
    split_layer: int = 0
    """First layer of the tail; 0 when nothing was split."""
    bypass_reason: str = ""
    """Why the worker was not used ("off", "absent", "refused", "rested", "small"); empty when it was."""
    fallbacks: tuple[str, ...] = ()
    """Causes of worker failures after which work was redone on the host."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    wait_s: float = 0.0
    """Seconds of the read in which the host had nothing to do but wait for the worker."""
    stages: tuple[UbatchTimes, ...] = ()
    """One entry an ubatch, in order; of the run that counted, when the worker failed and the read was redone."""


class Finished(Message, frozen=True):
    """The request ended well. `n_generated` tokens were sent as TokenReady."""

    request_id: str
    reason: Literal["stop", "length", "cancelled"]
    n_prompt: int
    n_generated: int
    report: ReadReport


class Failed(Message, frozen=True):
    """The request ended with an error of common.errors."""

    request_id: str
    code: int
    detail: str


class WorkerView(Part, frozen=True):
    """What the host knows of the worker."""

    state: Literal["absent", "connecting", "ready", "resting", "refused"] = "absent"
    detail: str = ""
    split_layer: int = 0
    device: str = ""


class HostStatus(Message, frozen=True):
    """State of the mac process; sent when asked and whenever something in it changed."""

    state: Literal["starting", "ready", "draining"]
    model: str
    n_ctx: int
    n_vocab: int
    requests_running: int
    requests_waiting: int
    worker: WorkerView
    beat: int
    """Grows only when the compute thread itself took a turn: a stuck engine shows here."""


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
    """The tail ran. Frame: ROWS blob of `blob_bytes` (0 when no rows were wanted)."""

    link_epoch: int
    ticket: int
    n_tokens: int
    compute_ms: float
    queue_ms: float
    round_trip_ms: float
    """Send of the chunk's first byte to its ack, on the bridge's clock."""
    blob_bytes: int

    @property
    def frame_bytes(self) -> tuple[int, ...]:
        return (self.blob_bytes,)


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
    """Keep the mirror's recurrent state at n_valid = n."""

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


# --- route "life": every process -> launch and back ---------------------------------------------------------------------


class StateChanged(Message, frozen=True):
    """A process moved on: starting -> ready -> serving -> draining -> stopped."""

    process: str
    pid: int
    state: Literal["starting", "ready", "serving", "draining", "stopped"]
    detail: str = ""
    listens: dict[str, str] = {}
    """Where the process listens, by purpose: {"metrics": "http://127.0.0.1:9571/metrics"}."""


class Beat(Message, frozen=True):
    """Sign of life; `work` grows only when the thread that does the work took a turn."""

    process: str
    pid: int
    work: int


GatewayToMac = Generate | GrantTokens | Cancel | AskStatus
MacToGateway = Queued | PrefillAdvanced | TokenReady | Finished | Failed | HostStatus
MacToBridge = AttachWorker | DetachWorker | ShowPhase
BridgeToMac = LinkUp | LinkDown | WorkerReported
MacToBridgeData = RunChunk | PushRows | PullRows | TakeSnapshot | RewindMirror
BridgeToMacData = ChunkDone | RowsPulled | MirrorAt | LinkFailed
ToLaunch = StateChanged | Beat

"""Messages of route "generate": what the gateway asks of the host, and what the host tells of each request.

Declared apart only for length: everybody uses them as `common.wire.messages`.
"""

from __future__ import annotations

from typing import Literal

from common.wire.message import Message, Part


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
    """Of the first choice; choice i takes seed + i."""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit), before anything else looks at the logits, also for greedy."""


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
    """Tokens the host may send before it has to wait for a GrantTokens; all choices draw on it."""
    n_choices: int = 1
    """Answers to write to the one prompt, which is read once."""
    top_logprobs: int | None = None
    """None: no log-probabilities; else each token comes with its own and those of so many likeliest."""

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
    choice: int | None = None
    """Stop only this choice (the gateway found a stop string); None: the whole request."""


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


class TokenLogprobs(Part, frozen=True):
    """Natural logarithms of probabilities, from the logits the sampler saw, before temperature (f32 log-softmax)."""

    logprob: float
    """Of the token chosen."""
    top: tuple[tuple[int, float], ...] = ()
    """(token id, logprob) of the likeliest tokens, likeliest first; of equals the lowest id first."""


class TokenReady(Message, frozen=True):
    """One generated token; index counts from 0 without gaps within its choice."""

    request_id: str
    index: int
    token_id: int
    choice: int = 0
    logprobs: TokenLogprobs | None = None
    """Only when the request asked for them."""


class ChoiceFinished(Message, frozen=True):
    """One choice of several ended while others go on; the last one to end brings Finished instead."""

    request_id: str
    choice: int
    reason: Literal["stop", "length", "cancelled"]
    n_generated: int


class UbatchTimes(Part, frozen=True):
    """Where the time of one ubatch of a read went. Seconds; the `at` values count from the start of the read."""

    position: int
    n_tokens: int
    head_at_s: float
    head_s: float
    """Layers before the split on the host; all layers when the ubatch ran on the host alone."""
    worker_s: float = 0.0
    """The tail's computing time, as the worker reports it; 0 when it did not take part."""
    sent_at_s: float = 0.0
    """When the residual left for the worker."""
    queue_s: float = 0.0
    """How long the chunk waited at the worker for the one before it, as the worker reports it."""
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
    """Why the worker was not used ("off", "absent", "refused", "rested", "small", "slow"); empty when it was."""
    fallbacks: tuple[str, ...] = ()
    """Causes of worker failures after which work was redone on the host."""
    tokens_returned: int = 0
    """Tokens planned for the worker whose tail the host ran after all, because the worker had become too slow."""
    tokens_reread: int = 0
    """Tokens that were run again because the worker was lost, with split decode; every token counts each time."""
    queue_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    decode_head_s: float = 0.0
    """With split decode: the host's layers over the answer's tokens, each counted once."""
    decode_worker_s: float = 0.0
    """And the worker's layers and output; the rest of decode_s is the way between them, and choosing."""
    wait_s: float = 0.0
    """Seconds of the read in which the host had nothing to do but wait for the worker."""
    stages: tuple[UbatchTimes, ...] = ()
    """One entry an ubatch, in order; of the run that counted, when the worker failed and the read was redone."""


class Finished(Message, frozen=True):
    """The request ended well, with its last choice, of which `n_generated` tokens were sent as TokenReady."""

    request_id: str
    reason: Literal["stop", "length", "cancelled"]
    n_prompt: int
    n_generated: int
    report: ReadReport
    choice: int = 0


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
    kernels: str = ""
    """Device, memory layouts and threads that compute, in words for people."""
    tokens_provisional: int = 0
    """Tokens of answers that are to be run again in idle time, before their rows can be reused."""

"""The one tree of errors. Every error says whose fault it is, its wire code and its HTTP status.

    OutriggerError
    ├── RequestError              the client asked for something that cannot be done as asked
    │   ├── ContextExceededError  the prompt does not fit the context
    │   ├── UnsupportedParameterError
    │   └── BusyError             the queue is full: ask again later
    ├── SettingError              a setting, flag or environment variable has a bad value
    ├── ModelError                a model file is missing, damaged, or of a kind we do not run
    │   ├── FingerprintError      both ends hold different models
    │   └── PackageError          a Core ML package is missing, damaged, or holds what we do not run
    │       └── BlobError         its weight file is truncated, damaged, or does not fit
    ├── EngineError               a tensor operation was asked with shapes or types that do not fit
    │   ├── OutOfMemoryError      a buffer could not be allocated
    │   ├── UnsupportedOperationError  the device lacks an operation of the model
    │   └── PredictionError       a Core ML program was asked with features that do not fit it
    ├── ProtocolError             somebody broke the wire format
    │   ├── LocalProtocolError    we did (a bug of ours)
    │   └── RemoteProtocolError   the peer did
    │       └── HashMismatchError its bytes are not those it hashed
    ├── LinkError                 the cable or the worker failed; the read is redone on the host
    │   ├── LinkDownError         no connection
    │   ├── LinkDeadlineError     an answer came too late
    │   ├── StaleEpochError       the message belongs to an earlier life of the link
    │   ├── WorkerBusyError       the worker serves another host
    │   ├── WorkerRefusedError    the worker said no to one operation; the link stays up
    │   └── BasePeerError         the peer lacks the extension messages that tail work needs
    └── ServiceError              a process of ours failed or did not start
        └── PageLoadError         the device could not load a frozen page; carries the cause

`code` is what crosses the wire (ERR2, Failed); codes are never reused. `status` is the HTTP status of the gateway.
"""

from __future__ import annotations


class OutriggerError(Exception):
    """Root of the tree. `code` crosses the wire, `status` is the HTTP status, `kind` the OpenAI error type."""

    code: int = 1
    status: int = 500
    kind: str = "server_error"


class RequestError(OutriggerError):
    """The client's request cannot be served as asked. `param` names the offending parameter."""

    code, status, kind = 100, 400, "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextExceededError(RequestError):
    """The prompt has more tokens than the context holds. Carries both numbers."""

    code, kind = 101, "exceed_context_size_error"

    def __init__(self, n_prompt_tokens: int, n_ctx: int) -> None:
        super().__init__(
            f"the prompt has {n_prompt_tokens} tokens and the context holds {n_ctx}; shorten the prompt, or "
            f"start with a larger context (OUTRIGGER_N_CTX; what of it is past OUTRIGGER_KV_HOST_TOKENS must have room "
            f"in the journal, OUTRIGGER_JOURNAL_MIB)",
            param="messages",
        )
        self.n_prompt_tokens = n_prompt_tokens
        self.n_ctx = n_ctx


class UnsupportedParameterError(RequestError):
    """A parameter this server does not know or does not support."""

    code = 102


class BusyError(RequestError):
    """The request queue is full."""

    code, status, kind = 103, 429, "rate_limit_error"


class SettingError(OutriggerError):
    """A setting has a bad value; the message names key, value and allowed range."""

    code = 200


class ModelError(OutriggerError):
    """A model file cannot be used; the message says what was found and what is supported."""

    code = 300


class FingerprintError(ModelError):
    """Host and worker hold different models."""

    code = 301


class PackageError(ModelError):
    """A Core ML package (.mlpackage) is missing, damaged, or holds something we do not run."""

    code = 310


class BlobError(PackageError):
    """The weight file of a Core ML package is truncated, damaged, or does not fit what is asked of it."""

    code = 311


class EngineError(OutriggerError):
    """Shapes, types or positions handed to the engine do not fit; nothing was computed."""

    code = 400


class OutOfMemoryError(EngineError):
    """A buffer could not be allocated."""

    code, status = 401, 503


class UnsupportedOperationError(EngineError):
    """The device cannot run an operation of the model; another device may."""

    code = 403


class PredictionError(EngineError):
    """A Core ML program was asked with features, shapes, states or a function that it does not have."""

    code, status = 402, 400


class PositionError(EngineError):
    """A chunk, row range or snapshot does not fit where the mirror stands."""

    code = 410


class NonFiniteError(EngineError):
    """A residual holds infinities or NaN; it was not computed."""

    code = 411


class ProtocolError(OutriggerError):
    """The wire format was broken."""

    code = 500


class LocalProtocolError(ProtocolError):
    """We tried to send something the protocol does not allow: a bug of ours."""

    code = 501


class RemoteProtocolError(ProtocolError):
    """The peer sent something the protocol does not allow."""

    code = 502


class HashMismatchError(RemoteProtocolError):
    """A frame's bytes are not the ones its sender hashed."""

    code = 503


class LinkError(OutriggerError):
    """The cable or the worker failed. What it was asked is discarded whole and redone on the host.

    `cause` is one short word for counters and reports.
    """

    code, status = 600, 503
    cause = "failed"

    def __init__(self, message: str, *, cause: str | None = None) -> None:
        super().__init__(message)
        if cause is not None:
            self.cause = cause


class LinkDownError(LinkError):
    """There is no connection to the worker."""

    code = 601
    cause = "down"


class LinkDeadlineError(LinkError):
    """The worker answered too late."""

    code = 602
    cause = "deadline"


class StaleEpochError(LinkError):
    """A message of an earlier life of the link."""

    code = 603
    cause = "stale_epoch"


class WorkerBusyError(LinkError):
    """The worker serves another host that is alive."""

    code = 604
    cause = "busy"


class WorkerRefusedError(LinkError):
    """The worker refused one operation (ERR2); the link is up and the mirror is where the answer says."""

    code = 605
    cause = "refused"


class BasePeerError(LinkError):
    """The peer speaks the base protocol only."""

    code = 606
    cause = "base_peer"


class ServiceError(OutriggerError):
    """A process of ours failed, or did not become ready."""

    code, status = 700, 503


class PageLoadError(ServiceError):
    """The device could not load a frozen page; ordinary kernels serve its keys. `cause` is one word for metrics."""

    code = 710

    def __init__(self, message: str, *, cause: str) -> None:
        super().__init__(message)
        self.cause = cause

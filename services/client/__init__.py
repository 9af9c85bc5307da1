"""Python clients of the public ZeroMQ endpoint, typed: one for asyncio, one for everybody else.

    from services.client import OutriggerClient

    with OutriggerClient() as client, client.generate(messages=[{"role": "user", "content": "hi"}]) as answer:
        for text in answer.texts():
            print(text, end="", flush=True)
        print(answer.finished.usage)

Leaving an answer's `with` block cancels what still runs. Errors are those of common.errors: RequestError and its kinds
when the request is at fault, BusyError when too many wait, ServiceError when the gateway or the host is. The
protocol is docs/zeromq.md's, and these clients know nothing that a foreign one could not know.
"""

from common.wire.public import (
    Accepted,
    ChoiceFinished,
    Finished,
    PieceWritten,
    Queued,
    ReadingPrompt,
)
from services.client.asynchronous import AsyncGeneration, AsyncOutriggerClient
from services.client.blocking import Generation, OutriggerClient
from services.client.results import DEFAULT_ENDPOINT, DEFAULT_EVENTS_ENDPOINT, HostState, WorkerState
from services.runtime.endpoints import CurveKeys

__all__ = [
    "DEFAULT_ENDPOINT",
    "DEFAULT_EVENTS_ENDPOINT",
    "Accepted",
    "AsyncGeneration",
    "AsyncOutriggerClient",
    "ChoiceFinished",
    "CurveKeys",
    "Finished",
    "Generation",
    "HostState",
    "OutriggerClient",
    "PieceWritten",
    "Queued",
    "ReadingPrompt",
    "WorkerState",
]

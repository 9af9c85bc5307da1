"""The client for ordinary, blocking code: the asyncio client on a thread of its own, behind plain methods.

The thread keeps the lease while the caller thinks, and lets several threads share a client. Ctrl-C works: a
blocked call is left by KeyboardInterrupt, and leaving the answer's `with` block cancels it.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from common.errors import ServiceError
from common.limits import PUBLIC_CREDIT
from common.wire import public as p
from services.client.asynchronous import AsyncGeneration, AsyncOutriggerClient, Update
from services.client.results import DEFAULT_ENDPOINT, DEFAULT_EVENTS_ENDPOINT, HostState
from services.runtime.endpoints import CurveKeys

T = TypeVar("T")

_END = object()


class OutriggerClient:
    """A client of one gateway. Use as `with`, or `close()` it. Any thread."""

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        events_endpoint: str = DEFAULT_EVENTS_ENDPOINT,
        keys: CurveKeys | None = None,
    ) -> None:
        """As AsyncOutriggerClient."""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrigger client", daemon=True)
        self._thread.start()
        self._closed = False

        async def connect() -> AsyncOutriggerClient:
            return AsyncOutriggerClient(endpoint, events_endpoint=events_endpoint, keys=keys)

        try:
            self._client = self._do(connect())
        except BaseException:
            self._stop()
            raise

    def generate(
        self,
        *,
        messages: list[dict[str, Any]] | None = None,
        prompt: str | list[int] | None = None,
        credit: int = PUBLIC_CREDIT,
        report: bool = False,
        **parameters: Any,
    ) -> Generation:
        """An answer to messages, a text, or token ids. `with` it: that sends the request, leaving cancels it."""
        generation = self._client.generate(
            messages=messages, prompt=prompt, credit=credit, report=report, **parameters
        )
        return Generation(self, generation)

    def tokenize(self, content: str, *, add_special: bool = False, parse_special: bool = True) -> list[int]:
        """Token ids of a text."""
        return self._do(self._client.tokenize(content, add_special=add_special, parse_special=parse_special))

    def detokenize(self, tokens: list[int]) -> str:
        """The text of token ids."""
        return self._do(self._client.detokenize(tokens))

    def status(self) -> HostState:
        """How the host is. Raises ServiceError with the reason when it cannot compute a token now."""
        return self._do(self._client.status())

    @contextmanager
    def events(self, *topics: str) -> Iterator[Iterator[p.AnyEvent]]:
        """Events as they happen, while in the `with` block; `topics` are their beginnings, none means all."""
        subscription = self._client.events(*topics)
        events = self._do(subscription.__aenter__())
        try:
            yield self._each(events)
        finally:
            self._do(subscription.__aexit__(None, None, None))

    def close(self) -> None:
        """Close the connection; the gateway cancels what is still open."""
        if not self._closed:
            try:
                self._do(self._client.close())
            finally:
                self._stop()

    def __enter__(self) -> OutriggerClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- inside

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the client's thread and wait for it; it is cancelled when the wait is interrupted."""
        if self._closed:
            work.close()
            raise ServiceError("the client was closed")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _each(self, source: AsyncIterator[T]) -> Iterator[T]:
        """An async iterator as an ordinary one."""

        async def following() -> Any:
            return await anext(source, _END)

        while (item := self._do(following())) is not _END:
            yield item

    def _stop(self) -> None:
        self._closed = True
        asyncio.run_coroutine_threadsafe(self._loop.shutdown_asyncgens(), self._loop).result()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


class Generation:
    """One answer. Iterate over it once, by `for` (pieces), `texts()`, `token_ids()`, `updates()`, or `text()`."""

    def __init__(self, client: OutriggerClient, generation: AsyncGeneration) -> None:
        self._client = client
        self._generation = generation

    @property
    def accepted(self) -> p.Accepted | None:
        """What the gateway said when it took the request."""
        return self._generation.accepted

    @property
    def finished(self) -> p.Finished | None:
        """Reason, usage and report, once the answer is complete."""
        return self._generation.finished

    def __enter__(self) -> Generation:
        self._client._do(self._generation.__aenter__())
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()

    def cancel(self) -> None:
        """Stop the answer; nothing happens when it is over."""
        self._client._do(self._generation.cancel())

    def updates(self) -> Iterator[Update]:
        """Everything that is told: accepted, queued, reading, pieces, ends of choices, finished. Raises its error."""
        return self._client._each(self._generation.updates())

    def __iter__(self) -> Iterator[p.PieceWritten]:
        return self._client._each(aiter(self._generation))

    def texts(self) -> Iterator[str]:
        """The text as it grows (of one choice; with several, look at `choice` of the pieces)."""
        return self._client._each(self._generation.texts())

    def token_ids(self) -> Iterator[int]:
        """Token ids as their text is out."""
        return self._client._each(self._generation.token_ids())

    def text(self) -> str:
        """The whole text."""
        return "".join(self.texts())

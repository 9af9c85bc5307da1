"""The asyncio client: one connection, any number of requests at once.

It grants credit as answers are consumed, sends ping while a request is open, and tells every open request when the
connection, or the gateway's memory of this client, is lost: an answer ends well or with an exception, never not at all.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from common.errors import OutriggerError, RemoteProtocolError, ServiceError
from common.limits import EVENTS_HWM_MESSAGES, PUBLIC_CREDIT
from common.wire import public as p
from services.client.results import (
    DEFAULT_ENDPOINT,
    DEFAULT_EVENTS_ENDPOINT,
    HostState,
    as_body,
    error_of,
    generate_body,
)
from services.runtime.bus import ForeignAsker, Listener
from services.runtime.endpoints import CurveKeys

SEND_WAIT_S = 2.0
PING_S = 5.0
"""Silence of this client after which it sends ping; sooner when the gateway's lease is short."""
LOOK_S = 0.25
SILENCE_S_MAX = 30.0
"""Unanswered pings for so long mean that the gateway is gone."""
LAST = (p.Finished, p.Cancelled, p.Failed, p.Tokens, p.Content, p.StatusTold)
"""Messages that end a request."""

Inbox = asyncio.Queue[p.AnyAnswer | OutriggerError]
Update = p.Accepted | p.Queued | p.ReadingPrompt | p.PieceWritten | p.ChoiceFinished | p.Finished


class AsyncOutriggerClient:
    """A client of one gateway. Make it inside a running loop; `async with` it, or `await close()`."""

    def __init__(
        self,
        endpoint: str = DEFAULT_ENDPOINT,
        *,
        events_endpoint: str = DEFAULT_EVENTS_ENDPOINT,
        keys: CurveKeys | None = None,
    ) -> None:
        """`keys`: our CURVE pair and the gateway's public key, for endpoints beyond this machine.

        Raises SettingError for an endpoint that is neither ipc, nor loopback tcp, nor tcp with keys.
        """
        self._events_endpoint = events_endpoint
        self._keys = keys
        self._ids = itertools.count(1)
        self._inboxes: dict[str, Inbox] = {}
        self._asked_at: dict[str, float] = {}
        self._pinged_at: dict[str, float] = {}
        self._ping_s = PING_S
        loop = asyncio.get_running_loop()
        self._now = loop.time
        self._heard_at = self._said_at = loop.time()
        self._asker = ForeignAsker(endpoint, self._heard, self._left, keys)
        self._pinging = loop.create_task(self._ping(), name="outrigger ping")

    async def close(self) -> None:
        """Close the connection; the gateway cancels what is still open."""
        self._pinging.cancel()
        await asyncio.gather(self._pinging, return_exceptions=True)
        await self._asker.close()
        self._fail_all(ServiceError("the client was closed"))

    async def __aenter__(self) -> AsyncOutriggerClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # --- what can be asked

    def generate(
        self,
        *,
        messages: list[dict[str, Any]] | None = None,
        prompt: str | list[int] | None = None,
        credit: int = PUBLIC_CREDIT,
        report: bool = False,
        **parameters: Any,
    ) -> AsyncGeneration:
        """An answer to messages, a text, or token ids. `async with` it: that sends the request, leaving cancels it.

        `parameters` are those of docs/api.md (max_tokens, temperature, stop, ...). `report`: tell where the answer was
        computed. Raises RequestError unless just one of messages and prompt is given.
        """
        body = as_body(generate_body(messages, prompt, parameters))
        ask = p.Generate(id=self._new_id(), body=body, credit=credit, report=report)
        return AsyncGeneration(self, ask)

    async def tokenize(
        self, content: str, *, add_special: bool = False, parse_special: bool = True
    ) -> list[int]:
        """Token ids of a text."""
        fields = {"content": content, "add_special": add_special, "parse_special": parse_special}
        answer = await self._ask_once(p.Tokenize(id=self._new_id(), body=as_body(fields)))
        return answer.tokens

    async def detokenize(self, tokens: list[int]) -> str:
        """The text of token ids."""
        answer = await self._ask_once(p.Detokenize(id=self._new_id(), body=as_body({"tokens": tokens})))
        return answer.content

    async def status(self) -> HostState:
        """How the host is. Raises ServiceError with the reason when it cannot compute a token now."""
        answer = await self._ask_once(p.Status(id=self._new_id()))
        return msgspec.convert(answer.state, HostState)

    @asynccontextmanager
    async def events(self, *topics: str) -> AsyncIterator[AsyncIterator[p.AnyEvent]]:
        """Events as they happen, while in the `async with` block; `topics` are their beginnings, none means all.

        What this side does not take in time is lost: gaps show in `seq`, counted per topic.
        """
        queue: asyncio.Queue[p.AnyEvent] = asyncio.Queue(EVENTS_HWM_MESSAGES)

        def heard(frames: list[Any]) -> None:
            with suppress(RemoteProtocolError):
                event = p.decode_event([frame.buffer for frame in frames])
                if event is not None and not queue.full():
                    queue.put_nowait(event)

        async def each() -> AsyncIterator[p.AnyEvent]:
            while True:
                yield await queue.get()

        async with Listener(self._events_endpoint, topics or ("",), heard, self._keys):
            yield each()

    # --- for AsyncGeneration

    async def _open(self, ask: Any) -> Inbox:
        inbox: Inbox = asyncio.Queue()
        self._inboxes[ask.id], self._asked_at[ask.id] = inbox, self._now()
        try:
            await self._tell(ask)
        except BaseException:
            self._close(ask.id)
            raise
        return inbox

    def _close(self, ask_id: str) -> None:
        self._inboxes.pop(ask_id, None)
        self._asked_at.pop(ask_id, None)

    async def _tell(self, ask: p.Ask, wait_s: float = SEND_WAIT_S) -> None:
        await self._asker.send(p.encode(ask), wait_s)
        self._said_at = self._now()

    def _keep_lease(self, lease_s: float) -> None:
        self._ping_s = min(PING_S, lease_s / 3)

    # --- inside

    def _new_id(self) -> str:
        return str(next(self._ids))

    async def _ask_once(self, ask: Any) -> Any:
        inbox = await self._open(ask)
        try:
            return _good(await inbox.get())
        finally:
            self._close(ask.id)

    def _heard(self, frames: list[Any]) -> None:
        self._heard_at = self._now()
        try:
            answer = p.decode_answer([frame.buffer for frame in frames])
        except RemoteProtocolError as error:
            self._fail_all(error)
            return
        match answer:
            case None | p.Alive():
                pass
            case p.Lost(n_messages=n_messages):
                self._fail_all(
                    ServiceError(f"the gateway dropped {n_messages} messages this client did not read")
                )
            case p.Pong():
                self._take_stock(answer)
            case p.Failed(id=""):
                self._fail_all(error_of(answer))
            case _:
                if inbox := self._inboxes.get(answer.id):
                    inbox.put_nowait(answer)
                    if isinstance(answer, LAST):
                        self._close(answer.id)

    def _take_stock(self, pong: p.Pong) -> None:
        """What was asked before the ping and is not known to the gateway was lost: its last word would be here."""
        pinged_at = self._pinged_at.pop(pong.id, 0.0)
        for ask_id, asked_at in list(self._asked_at.items()):
            if asked_at < pinged_at and ask_id not in pong.ids:
                self._fail(
                    ask_id, ServiceError("the gateway does not know this request any more; send it again")
                )

    def _left(self) -> None:
        self._fail_all(ServiceError("the connection to the gateway went down; send the request again"))

    def _fail_all(self, error: OutriggerError) -> None:
        for ask_id in list(self._inboxes):
            self._fail(ask_id, error)

    def _fail(self, ask_id: str, error: OutriggerError) -> None:
        self._inboxes[ask_id].put_nowait(error)
        self._close(ask_id)

    async def _ping(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            now = self._now()
            if not self._inboxes:
                self._heard_at = now
                continue
            if now - self._heard_at > SILENCE_S_MAX:
                self._fail_all(ServiceError(f"the gateway said nothing for {SILENCE_S_MAX:.0f} s"))
            if now - self._said_at < self._ping_s:
                continue
            ping = p.Ping(id=self._new_id())
            self._pinged_at[ping.id] = now
            with suppress(ServiceError):
                await self._tell(ping, wait_s=0.0)


class AsyncGeneration:
    """One answer. Iterate over it once, by `async for` (pieces), `texts()`, `token_ids()`, `updates()`, or `text()`."""

    def __init__(self, client: AsyncOutriggerClient, ask: p.Generate) -> None:
        self._client = client
        self._ask = ask
        self._inbox: Inbox | None = None
        self._n_ungranted = 0
        self.accepted: p.Accepted | None = None
        """What the gateway said when it took the request."""
        self.finished: p.Finished | None = None
        """Reason, usage and report, once the answer is complete."""

    async def __aenter__(self) -> AsyncGeneration:
        self._inbox = await self._client._open(self._ask)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.cancel()

    async def cancel(self) -> None:
        """Stop the answer; nothing happens when it is over."""
        if self._ask.id in self._client._inboxes:
            self._client._close(self._ask.id)
            with suppress(ServiceError):
                await self._client._tell(p.Cancel(id=self._ask.id))

    async def updates(self) -> AsyncIterator[Update]:
        """Everything that is told: accepted, queued, reading, pieces, ends of choices, finished. Raises its error."""
        while self.finished is None:
            if self._inbox is None:
                raise ServiceError("this answer was not asked for yet: use it in an `async with` block")
            answer = _good(await self._inbox.get())
            match answer:
                case p.Accepted():
                    self.accepted = answer
                    self._client._keep_lease(answer.lease_s)
                case p.Finished():
                    self.finished = answer
                case p.PieceWritten(n_tokens=n_tokens):
                    await self._grant(n_tokens)
            yield answer

    async def __aiter__(self) -> AsyncIterator[p.PieceWritten]:
        async for update in self.updates():
            if isinstance(update, p.PieceWritten):
                yield update

    async def texts(self) -> AsyncIterator[str]:
        """The text as it grows (of one choice; with several, look at `choice` of the pieces)."""
        async for piece in self:
            if piece.text:
                yield piece.text

    async def token_ids(self) -> AsyncIterator[int]:
        """Token ids as their text is out."""
        async for piece in self:
            for token_id in piece.token_ids:
                yield token_id

    async def text(self) -> str:
        """The whole text."""
        return "".join([text async for text in self.texts()])

    async def _grant(self, n_tokens: int) -> None:
        """Promise to take more once half of the credit is used."""
        self._n_ungranted += n_tokens
        if 2 * self._n_ungranted >= self._ask.credit and self._ask.id in self._client._inboxes:
            credit, self._n_ungranted = self._n_ungranted, 0
            await self._client._tell(p.Grant(id=self._ask.id, credit=credit))


def _good(answer: p.AnyAnswer | OutriggerError) -> Any:
    if isinstance(answer, OutriggerError):
        raise answer
    if isinstance(answer, p.Failed):
        raise error_of(answer)
    return answer

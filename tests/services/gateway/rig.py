"""A gateway over real sockets, with the host's end of the bus in the hands of the test.

The gateway, its HTTP and both ends of the ZeroMQ route are the real ones; they live on a loop in a thread of their own,
so that tests are ordinary blocking clients. What the host answers is a coroutine the test chooses.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import shutil
import tempfile
import threading
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from common.errors import ServiceError
from common.metrics import Metrics
from common.wire import messages as m
from common.wire.routes import GENERATE
from services.gateway.host import HostChannel
from services.gateway.prompt import PromptReader
from services.gateway.public_door import Manners, PublicDoor
from services.gateway.public_endpoints import Endpoints, open_endpoints
from services.gateway.public_events import Events
from services.gateway.server import Door, Gateway, listen
from services.gateway.streams import RequestTable
from services.gateway.trip import Trips
from services.runtime.bus import Owner
from services.runtime.endpoints import CurveKeys, ipc_endpoint, route_endpoint

N_CTX = 512
WAIT_S = 20.0
"""For what must happen: long, because a busy machine is no failure."""

PATIENT = Manners(lease_s=60.0, stall_s=60.0)


class TestHost:
    """The host's end of route "generate". `behave(host, ask, ids, peer)` answers one Generate."""

    __test__ = False

    def __init__(self, endpoint: str, n_vocab: int) -> None:
        self.endpoint = endpoint
        self.n_vocab = n_vocab
        self.behave: Behaviour = finish_at_once
        self.told: list[m.Message] = []
        self.n_granted: dict[str, int] = {}
        self.beats = True
        self.state = "ready"
        self._beat = 0
        self._owner: Owner | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    async def open(self) -> None:
        self._owner = Owner(GENERATE, self.endpoint)
        self._start(self._serve(self._owner))

    async def close(self) -> None:
        """The host process dies."""
        for task in list(self._tasks):
            task.cancel()
        if self._owner is not None:
            await self._owner.close()
        self._owner = None

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def send(self, message: m.Message, peer: bytes) -> None:
        """Sends, and waits while the pipe is full: this host writes faster than any that computes."""
        while self._owner is not None:
            try:
                return await self._owner.send(message, to=peer)
            except ServiceError as error:
                if "does not read" not in str(error):
                    raise
            await asyncio.sleep(0.005)
        return None

    async def _serve(self, owner: Owner) -> None:
        async for received in owner:
            message, peer = received.message, received.peer
            if isinstance(message, m.AskStatus):
                self._beat += self.beats
                worker = m.WorkerView()
                status = m.HostStatus(self.state, "test", N_CTX, self.n_vocab, 0, 0, worker, self._beat)
                await self.send(status, peer)
                continue
            self.told.append(message)
            if isinstance(message, m.Generate):
                self.n_granted[message.request_id] = message.credit
                ids = np.frombuffer(received.frames[0], np.int32)
                self._start(self._answer(message, ids, peer))
            elif isinstance(message, m.GrantTokens):
                self.n_granted[message.request_id] += message.credit

    async def _answer(self, ask: m.Generate, ids: np.ndarray, peer: bytes) -> None:
        await self.behave(self, ask, ids, peer)

    def cancelled(self, request_id: str) -> bool:
        return m.Cancel(request_id) in self.told

    async def write(self, ask: m.Generate, peer: bytes, token_ids: list[int], reason: str = "stop") -> None:
        """Sends tokens as a host must: within the credit, until a Cancel, and a Finished at the end."""
        n_sent = 0
        for token_id in token_ids[: ask.max_tokens]:
            while n_sent >= self.n_granted[ask.request_id] and not self.cancelled(ask.request_id):  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            if self.cancelled(ask.request_id):
                reason = "cancelled"
                break
            await self.send(m.TokenReady(ask.request_id, n_sent, token_id), peer)
            n_sent += 1
            await asyncio.sleep(0)
        if len(token_ids) > ask.max_tokens:
            reason = "length"
        report = m.ReadReport(tokens_host=ask.n_tokens, prefill_s=0.25)
        await self.send(m.Finished(ask.request_id, reason, ask.n_tokens, n_sent, report), peer)


Behaviour = Callable[[TestHost, m.Generate, np.ndarray, bytes], Awaitable[None]]


async def finish_at_once(host: TestHost, ask: m.Generate, ids: np.ndarray, peer: bytes) -> None:
    await host.write(ask, peer, [])


async def stay_silent(host: TestHost, ask: m.Generate, ids: np.ndarray, peer: bytes) -> None:
    await host.send(m.Queued(ask.request_id, 0), peer)


class Rig:
    """Gateway and test host on a loop in a thread."""

    def __init__(
        self,
        model: Path,
        *,
        api_key: str | None = None,
        beat_s_max: float = 60.0,
        waiting_max: int = 32,
        manners: Manners = PATIENT,
        keys: CurveKeys | None = None,
    ) -> None:
        self.manners, self.keys = manners, keys
        self.run_dir = Path(tempfile.mkdtemp(prefix="outrigger-test-"))
        self.prompts = PromptReader.load(model)
        self.metrics = Metrics("gateway")
        self.host = TestHost(route_endpoint(self.run_dir, GENERATE), self.prompts.vocabulary.n_vocab)
        self._door = Door(api_key=api_key, comment_every_s=0.2)
        self._limits = {"beat_s_max": beat_s_max, "waiting_max": waiting_max}
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._run, name="gateway under test")

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        vocabulary = self.prompts.vocabulary
        self.table = RequestTable(vocabulary.piece, vocabulary.end_ids, vocabulary.spelling)
        await self.host.open()
        self.events = Events()
        async with (
            HostChannel(
                self.host.endpoint, self.table, **self._limits, on_status=self.events.status
            ) as self.channel,
            AsyncExitStack() as stack,
        ):
            self._tasks = [
                asyncio.ensure_future(self.channel.listen()),
                asyncio.ensure_future(self.channel.tick()),
            ]
            self.trips = Trips(
                self.prompts, self.channel, self.metrics, deadline_s=60.0, watch=self.events.watch
            )
            gateway = Gateway(self._door, self.trips)
            runner, self.port = await listen(gateway, "127.0.0.1", 0)
            await self._open_public(stack)
            self._started.set()
            await self._stop.wait()
            await self.trips.drain(0.5)
            await runner.cleanup()
            self.trips.close()
            for task in self._tasks:
                task.cancel()
        await self.host.close()

    async def _open_public(self, stack: AsyncExitStack) -> None:
        """The ZeroMQ door, on free ports, with whatever keys the test gave."""
        self.door = PublicDoor(self.trips, self.manners, self.metrics)
        places = Endpoints(
            (ipc_endpoint(self.run_dir / "public.sock"), "tcp://127.0.0.1:0"),
            ("tcp://127.0.0.1:0",),
            self.keys,
        )
        self.listens = await open_endpoints(stack, self.door, self.events, places, asyncio.ensure_future)
        self._tasks.append(asyncio.ensure_future(self.door.tick()))
        stack.push_async_callback(self.door.close)

    def __enter__(self) -> Rig:
        self._thread.start()
        assert self._started.wait(WAIT_S)
        self.until(lambda: self.channel.why_not() is None)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(WAIT_S)
        shutil.rmtree(self.run_dir)
        assert not self._thread.is_alive()

    def do(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Runs a coroutine on the rig's loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(WAIT_S)

    def run(self, work: Callable[[], None]) -> None:
        """Calls something on the rig's loop, where the gateway lives."""

        async def call() -> None:
            work()

        self.do(call())

    def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something that must happen."""
        pause = threading.Event()
        for _ in range(int(WAIT_S / 0.01)):
            if condition():
                return
            pause.wait(0.01)
        raise ServiceError("it never happened")

    def say(self, text: str) -> None:
        """The host answers every request with the tokens of `text`."""
        token_ids = self.prompts.vocabulary.tokenize(text)

        async def behave(host: TestHost, ask: m.Generate, _ids: np.ndarray, peer: bytes) -> None:
            await host.write(ask, peer, token_ids)

        self.host.behave = behave

    @contextmanager
    def connection(self):
        """A plain HTTP connection."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=WAIT_S)
        try:
            yield connection
        finally:
            connection.close()

    def request(self, method: str, path: str, body: Any = None, **headers: str) -> tuple[int, Any]:
        """One request; returns the status and the JSON body. A body that is no bytes is sent as JSON."""
        if body is not None and not isinstance(body, bytes):
            body = json.dumps(body).encode()
        with self.connection() as connection:
            connection.request(method, path, body, {"Content-Type": "application/json"} | headers)
            response = connection.getresponse()
            return response.status, json.loads(response.read())

    def chat(self, **fields: Any) -> tuple[int, Any]:
        """One chat request without a stream."""
        return self.request("POST", "/v1/chat/completions", chat_body(**fields))

    def metric(self, name: str, **labels: str) -> float:
        return self.metrics.registry.get_sample_value(name, labels) or 0.0


def chat_body(**fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": "hi"}]} | fields


def events(response: http.client.HTTPResponse) -> tuple[list[Any], list[str]]:
    """All events (parsed) and comments of a stream."""
    found, comments = [], []
    for block in response.read().decode().split("\n\n"):
        if block.startswith("data: "):
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
        elif block:
            assert block.startswith(": ")
            comments.append(block.removeprefix(": "))
    return found, comments
